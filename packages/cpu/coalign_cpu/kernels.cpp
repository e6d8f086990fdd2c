// Kernels for CPUs, compiled by the machine's compiler when they are first needed (library.py).
//
// Functions take addresses and sizes in elements, and compute in float32 whatever the tensors hold. A row of a result
// has the same bits whatever else is computed with it, and for any number of threads. Memory is the caller's.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct BFloat16 {
    uint16_t bits;
};

inline float load(float x) { return x; }

inline float load(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void store(float &to, float x) { to = x; }

inline void store(BFloat16 &to, float x) {  // rounds to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = x == x ? uint16_t(rounded) : uint16_t(0x7fc0);
}

// e^x within 8e-8 of it; 0 where it would be subnormal. Written out, so that loops over it become vector
// instructions with every compiler.
inline float exp_(float x) {
    const float shift = 12582912.0f;  // 1.5 · 2^23: adding it leaves the nearest integer in the low bits
    float shifted = x * 1.442695041f + shift;
    float whole = shifted - shift;
    float rest = (x - whole * 0.693145752f) - whole * 1.428606765e-6f;
    float sum = 1.9875691500e-4f;  // the polynomial of Cephes' expf
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    float result = sum * power;
    return x < -87.0f ? 0.0f : (x > 88.0f ? std::numeric_limits<float>::infinity() : result);
}

// ---- vectors

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));

// Halve the groups of `group` partial sums in a and b: those of a come to the first lanes, those of b to the last.
template <int group, int... lane>
inline Vector fold(Vector a, Vector b, std::integer_sequence<int, lane...>) {
    constexpr int half = group / 2, rest = LANES / 2;
#define FIRST (lane / rest * LANES + lane % rest / half * group + lane % half)
    return __builtin_shufflevector(a, b, FIRST...) + __builtin_shufflevector(a, b, (FIRST + half)...);
#undef FIRST
}

// Sum each of LANES vectors; lane i of the result is the sum of vector i.
template <int group = LANES>
inline Vector sum_each(Vector *vectors) {
    for (int i = 0; i < group / 2; ++i)
        vectors[i] = fold<group>(vectors[2 * i], vectors[2 * i + 1], std::make_integer_sequence<int, LANES>());
    if constexpr (group > 2) return sum_each<group / 2>(vectors);
    return vectors[0];
}

// ---- attention of single tokens

struct Tokens {              // of attend_tokens, below
    const int64_t *slots;    // [rows]; null: row r has slot r
    const int64_t *positions;
    const int64_t *prefixes;  // [2, rows]; null: no slot shares its first keys with another
    int64_t rows, heads, groups, width, value_width, length;
    int64_t query_row, query_head, new_row, new_head, new_value_row, new_value_head;
    float scale, softcap;
    int64_t window;
};

// Keys or values of one sequence: of the first `split` tokens in `prefix`, of the others in `own`.
template <class T>
struct Stored {
    const T *own, *prefix;
    int64_t split, stride, width;
};

// Read the tokens first..first+LANES-1 into vectors; tokens from `count` on are 0.
template <class T, int N>
inline void read_tokens(const Stored<T> &stored, int64_t first, int64_t count, int64_t vectors, Vector *to) {
    const int64_t n = N ? N : vectors;
    for (int64_t token = first; token < first + LANES; ++token) {
        float *numbers = reinterpret_cast<float *>(to + (token - first) * n);
        const T *from = (token < stored.split ? stored.prefix : stored.own) + token * stored.stride;
        if (token >= count)
            std::fill(numbers, numbers + n * LANES, 0.0f);
        else
            for (int64_t i = 0; i < (N ? N * LANES : stored.width); ++i) numbers[i] = load(from[i]);
    }
}

// All query heads that share a key head, for one token. N: vectors of a key and of a value if known here, else 0.
template <class T, int N>
void attend_heads(const Tokens &t, const T *query, const Stored<T> &keys, const Stored<T> &values, T *out,
                  int64_t count, std::vector<Vector> &memory) {
    const int64_t shared = t.heads / t.groups, blocks = (count + LANES - 1) / LANES;
    const int64_t n = N ? N : (t.width + LANES - 1) / LANES, m = N ? N : (t.value_width + LANES - 1) / LANES;
    memory.assign(shared * (blocks + n + m) + LANES * std::max(n, m), Vector{});
    Vector *scores = memory.data(), *q = scores + shared * blocks, *sums = q + shared * n, *rows = sums + shared * m;
    for (int64_t r = 0; r < shared; ++r)
        for (int64_t i = 0; i < t.width; ++i)
            reinterpret_cast<float *>(q + r * n)[i] = load(query[r * t.query_head + i]) * t.scale;
    for (int64_t block = 0; block < blocks; ++block) {
        read_tokens<T, N>(keys, block * LANES, count, n, rows);
        for (int64_t r = 0; r < shared; ++r) {
            Vector products[LANES];
            for (int key = 0; key < LANES; ++key) {
                products[key] = q[r * n] * rows[key * n];
                for (int64_t i = 1; i < n; ++i) products[key] += q[r * n + i] * rows[key * n + i];
            }
            scores[r * blocks + block] = sum_each(products);
        }
    }
    for (int64_t r = 0; r < shared; ++r) {
        float *own = reinterpret_cast<float *>(scores + r * blocks);
        float top = -std::numeric_limits<float>::infinity(), total = 0;
        if (t.softcap > 0)
            for (int64_t c = 0; c < count; ++c) own[c] = t.softcap * std::tanh(own[c] / t.softcap);
#pragma omp simd reduction(max : top)
        for (int64_t c = 0; c < count; ++c) top = own[c] > top ? own[c] : top;
#pragma omp simd reduction(+ : total)
        for (int64_t c = 0; c < count; ++c) total += own[c] = exp_(own[c] - top);
        const float inverse = 1 / total;
        for (int64_t c = 0; c < count; ++c) own[c] *= inverse;
        std::fill(own + count, own + blocks * LANES, 0.0f);
    }
    for (int64_t block = 0; block < blocks; ++block) {
        read_tokens<T, N>(values, block * LANES, count, m, rows);
        for (int64_t r = 0; r < shared; ++r) {
            const Vector weights = scores[r * blocks + block];
            for (int64_t i = 0; i < m; ++i) {
                Vector sum = sums[r * m + i];
                for (int key = 0; key < LANES; ++key) sum += weights[key] * rows[key * m + i];
                sums[r * m + i] = sum;
            }
        }
    }
    for (int64_t r = 0; r < shared; ++r)
        for (int64_t i = 0; i < t.value_width; ++i)
            store(out[r * t.value_width + i], reinterpret_cast<float *>(sums + r * m)[i]);
}

template <class T, int N>
void attend_tokens(const Tokens &t, const T *query, const T *new_key, const T *new_value, T *keys, T *values, T *out,
                   int threads) {
    const int64_t shared = t.heads / t.groups;
#pragma omp parallel num_threads(threads)
    {
        std::vector<Vector> memory;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < t.rows * t.groups; ++item) {
            const int64_t row = item / t.groups, group = item % t.groups, position = t.positions[row];
            const int64_t slot = t.slots ? t.slots[row] : row;
            const int64_t first = t.window > 0 ? std::max<int64_t>(0, position - t.window + 1) : 0;
            const int64_t home = t.prefixes ? t.prefixes[row] : slot;
            const int64_t split = t.prefixes ? t.prefixes[t.rows + row] - first : 0;
            auto at = [&](int64_t place, int64_t slot) { return (slot * t.length + place) * t.groups + group; };
            auto stored = [&](const T *all, int64_t width) {
                const T *own = all + at(first, slot) * width, *prefix = all + at(first, home) * width;
                return Stored<T>{own, prefix, split, t.groups * width, width};
            };
            if (new_key) {
                const T *key = new_key + row * t.new_row + group * t.new_head;
                const T *value = new_value + row * t.new_value_row + group * t.new_value_head;
                std::copy(key, key + t.width, keys + at(position, slot) * t.width);
                std::copy(value, value + t.value_width, values + at(position, slot) * t.value_width);
            }
            attend_heads<T, N>(t, query + row * t.query_row + group * shared * t.query_head, stored(keys, t.width),
                               stored(values, t.value_width), out + item * shared * t.value_width,
                               position + 1 - first, memory);
        }
    }
}

template <class T>
void choose_width(const Tokens &t, const void *query, const void *new_key, const void *new_value, void *keys,
                  void *values, void *out, int threads) {
    auto call = [&](auto attend) {
        attend(t, static_cast<const T *>(query), static_cast<const T *>(new_key), static_cast<const T *>(new_value),
               static_cast<T *>(keys), static_cast<T *>(values), static_cast<T *>(out), threads);
    };
    if (t.width == 64 && t.value_width == 64)
        call(attend_tokens<T, 64 / LANES>);
    else if (t.width == 128 && t.value_width == 128)
        call(attend_tokens<T, 128 / LANES>);
    else
        call(attend_tokens<T, 0>);
}

// ---- one token of each row's distribution

constexpr int64_t CHUNK = 128;

template <class T>
void draw_tokens(const T *logits, int64_t rows, int64_t size, int64_t stride, const double *uniform, float inverse,
                 int64_t *tokens, float *logprobs, int threads) {
    const int64_t chunks = (size + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> sums(chunks);
        float weights[CHUNK];
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const T *own = logits + row * stride;
            float top = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : top)
            for (int64_t i = 0; i < size; ++i) {
                float x = load(own[i]);
                top = x > top ? x : top;
            }
            auto weigh = [&](int64_t chunk) {  // returns how many
                const T *here = own + chunk * CHUNK;
                const int64_t count = std::min(CHUNK, size - chunk * CHUNK);
#pragma omp simd
                for (int64_t i = 0; i < count; ++i) weights[i] = exp_((load(here[i]) - top) * inverse);
                return count;
            };
            double total = 0;
            int64_t last = 0;  // the last chunk that added anything
            for (int64_t chunk = 0; chunk < chunks; ++chunk) {
                const int64_t count = weigh(chunk);
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < count; ++i) sum += weights[i];
                sums[chunk] = sum;
                total += sum;
                if (sum > 0) last = chunk;
            }
            const double target = uniform[row] * total;
            double before = 0;
            int64_t chunk = 0;
            while (chunk < last && !(before + sums[chunk] > target)) before += sums[chunk++];
            const int64_t count = weigh(chunk);
            int64_t place = 0, found = 0;
            for (; place < count; ++place) {  // rounding may put the target past the end: then the last one with weight
                if (weights[place] > 0) found = place;
                if ((before += weights[place]) > target) break;
            }
            tokens[row] = chunk * CHUNK + found;
            logprobs[row] = (load(own[tokens[row]]) - top) * inverse - float(std::log(total));
        }
    }
}

// ---- log-probs of targets, from tiles of the logits

struct Head {  // logits as a function of products; see Head in algorithms/logprobs.py
    float inner, outer;  // outer 0: no soft cap
};

template <class T>
inline void read_logits(const T *products, Head head, int64_t count, float *to) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] = load(products[i]) * head.inner;
    if (head.outer > 0)
        for (int64_t i = 0; i < count; ++i) to[i] = head.outer * std::tanh(to[i]);
}

template <class T>
void add_tile(const T *products, int64_t rows, int64_t count, Head head, const int64_t *targets, int64_t start, float *top,
              float *total, float *moment, float *chosen, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> memory(count);
        float *logits = memory.data();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            read_logits(products + row * count, head, count, logits);
            const int64_t target = targets[row] - start;
            if (target >= 0 && target < count) chosen[row] = logits[target];
            float highest = top[row], sum = 0, weighted = 0;
#pragma omp simd reduction(max : highest)
            for (int64_t i = 0; i < count; ++i) highest = logits[i] > highest ? logits[i] : highest;
            const float moved = top[row] - highest, shrink = exp_(moved);
            if (moment) {  // Σ exp(z - top) · (z - top), which moves with top
#pragma omp simd reduction(+ : sum, weighted)
                for (int64_t i = 0; i < count; ++i) {
                    float z = logits[i] - highest, weight = exp_(z);
                    sum += weight;
                    weighted += weight > 0 ? weight * z : 0.0f;
                }
                moment[row] = shrink * (moment[row] + (total[row] > 0 ? total[row] * moved : 0.0f)) + weighted;
            } else {
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < count; ++i) sum += exp_(logits[i] - highest);
            }
            total[row] = shrink * total[row] + sum;
            top[row] = highest;
        }
    }
}

template <class T>
void turn_into_errors(T *products, int64_t rows, int64_t count, Head head, const int64_t *targets, int64_t start,
                      const float *normaliser, const float *grad, const float *grad_entropy, const float *entropies,
                      int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> memory(2 * count);
        float *logits = memory.data(), *errors = logits + count;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            T *own = products + row * count;
            read_logits(own, head, count, logits);
            float peak = 1;
            if (entropies) {
                const float entropy = entropies[row], weight = grad_entropy[row], own_grad = grad[row];
                peak = own_grad;
#pragma omp simd
                for (int64_t i = 0; i < count; ++i) {
                    float z = logits[i] - normaliser[row], probability = exp_(z);
                    errors[i] = probability > 0 ? ((z + entropy) * weight + own_grad) * probability : probability;
                }
            } else {
#pragma omp simd
                for (int64_t i = 0; i < count; ++i) errors[i] = exp_(logits[i] - normaliser[row]);
            }
            const int64_t target = targets[row] - start;
            if (target >= 0 && target < count) errors[target] -= peak;
            if (head.outer > 0)
                for (int64_t i = 0; i < count; ++i) errors[i] *= head.outer - logits[i] * logits[i] / head.outer;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) store(own[i], errors[i]);
        }
    }
}

// ---- layers between matrix products

constexpr int64_t ROWS = 64;  // of one addend to a weight's gradient: their order does not depend on threads

inline float round_to(float x, float) { return x; }

inline float round_to(float x, BFloat16 rounded) {
    store(rounded, x);
    return load(rounded);
}

template <class X, class O>
void normalise(const X *x, const float *weight, int64_t rows, int64_t width, float epsilon, O *out, float *scales,
               int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; ++row) {
        const X *own = x + row * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; ++i) sum += load(own[i]) * load(own[i]);
        const float scale = 1 / std::sqrt(sum / width + epsilon);
        scales[row] = scale;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) store(out[row * width + i], weight[i] * round_to(load(own[i]) * scale, X{}));
    }
}

template <class X, class O>
void normalise_back(const X *x, const float *weight, const float *scales, const O *grad, int64_t rows, int64_t width,
                    X *grad_x, float *addends, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t block = 0; block < (rows + ROWS - 1) / ROWS; ++block) {
        float *addend = addends + block * width;
        std::fill(addend, addend + width, 0.0f);
        for (int64_t row = block * ROWS; row < std::min(rows, (block + 1) * ROWS); ++row) {
            const X *own = x + row * width;
            const O *g = grad + row * width;
            const float scale = scales[row];
            float along = 0;
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < width; ++i) {
                const float normal = load(own[i]) * scale, upstream = load(g[i]);
                along += upstream * weight[i] * normal;
                addend[i] += upstream * normal;
            }
            along /= width;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i)
                store(grad_x[row * width + i], scale * (load(g[i]) * weight[i] - load(own[i]) * scale * along));
        }
    }
}

template <class T>
void gate_silu(const T *gate, const T *up, int64_t size, T *out, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < size; ++i) {
        const float x = load(gate[i]);
        store(out[i], round_to(x / (1 + exp_(-x)), T{}) * load(up[i]));
    }
}

template <class T>
void gate_silu_back(const T *gate, const T *up, const T *grad, int64_t size, T *grad_gate, T *grad_up, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads)
    for (int64_t i = 0; i < size; ++i) {
        const float x = load(gate[i]), g = load(grad[i]), share = 1 / (1 + exp_(-x));
        store(grad_up[i], g * x * share);
        store(grad_gate[i], g * load(up[i]) * share * (1 + x * (1 - share)));
    }
}

// ---- copies with checksums

struct Shares {  // which pieces of a block a checksum looks at; see weights/sync/checksums.py
    int64_t turn;  // below 0: at all
    int64_t piece, shares;
    uint64_t step;
};

// Σ word_i · (i · step + 1) over the words of `data`, the first of which is number `first`; a last one is filled up.
uint64_t sum_words(const char *data, int64_t size, uint64_t first, uint64_t step) {
    const int64_t count = size / 8;
    uint64_t sum = 0, word;
#pragma omp simd reduction(+ : sum) private(word)
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(&word, data + 8 * i, 8);
        sum += word * ((first + i) * step + 1);
    }
    if (size % 8) {
        word = 0;
        std::memcpy(&word, data + 8 * count, size % 8);
        sum += word * ((first + count) * step + 1);
    }
    return sum;
}

// Copy past the caches: an ordinary copy first reads what it is about to overwrite.
void copy_past_caches(const char *from, char *to, int64_t size) {
#if defined(__AVX512F__)
    typedef __m512i Line;
    const auto read = [](const char *at) { return _mm512_loadu_si512(at); };
    const auto write = [](char *at, Line line) { _mm512_stream_si512(reinterpret_cast<Line *>(at), line); };
#elif defined(__AVX__)
    typedef __m256i Line;
    const auto read = [](const char *at) { return _mm256_loadu_si256(reinterpret_cast<const Line *>(at)); };
    const auto write = [](char *at, Line line) { _mm256_stream_si256(reinterpret_cast<Line *>(at), line); };
#endif
#if defined(__AVX__)
    constexpr int64_t width = sizeof(Line);
    int64_t done = std::min<int64_t>(size, -reinterpret_cast<uintptr_t>(to) & (width - 1));
    std::memcpy(to, from, done);
    for (; done + 4 * width <= size; done += 4 * width) {
        Line lines[4];
        for (int i = 0; i < 4; ++i) lines[i] = read(from + done + i * width);
        for (int i = 0; i < 4; ++i) write(to + done + i * width, lines[i]);
    }
    std::memcpy(to + done, from + done, size - done);
    _mm_sfence();
#else
    std::memcpy(to, from, size);
#endif
}

constexpr int64_t AT_ONCE = 4096;  // bytes: they are still in the cache when they are read again

// Copy one piece of a block, if there is a target; return its addend to the block's checksum.
uint64_t take_piece(const char *block, char *target, int64_t size, int64_t piece, const Shares &s) {
    const int64_t pieces = std::max<int64_t>(1, (size + s.piece - 1) / s.piece);
    const int64_t shares = s.turn < 0 ? 1 : std::min(s.shares, pieces);
    const int64_t begin = piece * s.piece, end = std::min(begin + s.piece, size);
    if (s.turn >= 0 && piece % shares != s.turn % shares) {
        if (target) copy_past_caches(block + begin, target + begin, end - begin);
        return 0;
    }
    const uint64_t first = piece / shares * s.piece / 8;  // of the words that count
    uint64_t sum = end - begin;
    for (int64_t at = begin; at < end; at += AT_ONCE) {
        const int64_t count = std::min(AT_ONCE, end - at);
        sum += sum_words(block + at, count, first + (at - begin) / 8, s.step);
        if (target) copy_past_caches(block + at, target + at, count);
    }
    return sum;
}

void copy_blocks(const char *const *from, char *const *to, const int64_t *sizes, int64_t blocks, const Shares &s,
                 uint64_t *sums, int threads) {
    std::vector<std::pair<int64_t, int64_t>> pieces;  // of which block, and which one of it
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t piece = 0; piece == 0 || piece * s.piece < sizes[block]; ++piece) pieces.push_back({block, piece});
    std::fill(sums, sums + blocks, 0);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (size_t i = 0; i < pieces.size(); ++i) {
        const auto [block, piece] = pieces[i];
        const uint64_t sum = take_piece(from[block], to ? to[block] : nullptr, sizes[block], piece, s);
#pragma omp atomic
        sums[block] += sum;
    }
}

}  // namespace

extern "C" {

// What the functions compute stands in operations.py. `bfloat16`: whether T is BFloat16 or float.

void attend_tokens_of(int bfloat16, const void *query, const void *new_key, const void *new_value, void *keys,
                      void *values, void *out, const int64_t *slots, const int64_t *positions, const int64_t *prefixes,
                      const int64_t *sizes, float scale, float softcap, int64_t window, int threads) {
    Tokens t{slots, positions, prefixes, sizes[0], sizes[1], sizes[2],  sizes[3], sizes[4], sizes[5], sizes[6],
             sizes[7], sizes[8], sizes[9], sizes[10], sizes[11], scale, softcap, window};
    auto attend = bfloat16 ? choose_width<BFloat16> : choose_width<float>;
    attend(t, query, new_key, new_value, keys, values, out, threads);
}

void draw_tokens_of(int bfloat16, const void *logits, int64_t rows, int64_t size, int64_t stride, const double *uniform,
                    float inverse, int64_t *tokens, float *logprobs, int threads) {
    auto call = [&](auto *typed) {
        draw_tokens(typed, rows, size, stride, uniform, inverse, tokens, logprobs, threads);
    };
    bfloat16 ? call(static_cast<const BFloat16 *>(logits)) : call(static_cast<const float *>(logits));
}

void add_tile_of(int bfloat16, const void *products, int64_t rows, int64_t count, float inner, float outer,
                 const int64_t *targets, int64_t start, float *top, float *total, float *moment, float *chosen,
                 int threads) {
    auto call = [&](auto *typed) {
        add_tile(typed, rows, count, {inner, outer}, targets, start, top, total, moment, chosen, threads);
    };
    bfloat16 ? call(static_cast<const BFloat16 *>(products)) : call(static_cast<const float *>(products));
}

void turn_into_errors_of(int bfloat16, void *products, int64_t rows, int64_t count, float inner, float outer,
                         const int64_t *targets, int64_t start, const float *normaliser, const float *grad,
                         const float *grad_entropy, const float *entropies, int threads) {
    auto call = [&](auto *typed) {
        turn_into_errors(typed, rows, count, {inner, outer}, targets, start, normaliser, grad, grad_entropy, entropies,
                         threads);
    };
    bfloat16 ? call(static_cast<BFloat16 *>(products)) : call(static_cast<float *>(products));
}

void normalise_of(int x_bfloat16, int out_bfloat16, const void *x, const float *weight, int64_t rows, int64_t width,
                  float epsilon, void *out, float *scales, int threads) {
    auto call = [&](auto *x, auto *out) { normalise(x, weight, rows, width, epsilon, out, scales, threads); };
    auto with_out = [&](auto *x) {
        out_bfloat16 ? call(x, static_cast<BFloat16 *>(out)) : call(x, static_cast<float *>(out));
    };
    x_bfloat16 ? with_out(static_cast<const BFloat16 *>(x)) : with_out(static_cast<const float *>(x));
}

void normalise_back_of(int x_bfloat16, int out_bfloat16, const void *x, const float *weight, const float *scales,
                       const void *grad, int64_t rows, int64_t width, void *grad_x, float *addends, int threads) {
    auto call = [&](auto *typed, auto *g) {
        typedef std::remove_const_t<std::remove_pointer_t<decltype(typed)>> X;
        normalise_back(typed, weight, scales, g, rows, width, static_cast<X *>(grad_x), addends, threads);
    };
    auto with_grad = [&](auto *typed) {
        out_bfloat16 ? call(typed, static_cast<const BFloat16 *>(grad)) : call(typed, static_cast<const float *>(grad));
    };
    x_bfloat16 ? with_grad(static_cast<const BFloat16 *>(x)) : with_grad(static_cast<const float *>(x));
}

void gate_silu_of(int bfloat16, const void *gate, const void *up, int64_t size, void *out, int threads) {
    auto call = [&](auto *out) {
        typedef const std::remove_pointer_t<decltype(out)> T;
        gate_silu(static_cast<T *>(gate), static_cast<T *>(up), size, out, threads);
    };
    bfloat16 ? call(static_cast<BFloat16 *>(out)) : call(static_cast<float *>(out));
}

void gate_silu_back_of(int bfloat16, const void *gate, const void *up, const void *grad, int64_t size, void *grad_gate,
                       void *grad_up, int threads) {
    auto call = [&](auto *to) {
        typedef const std::remove_pointer_t<decltype(to)> T;
        gate_silu_back(static_cast<T *>(gate), static_cast<T *>(up), static_cast<T *>(grad), size, to,
                       static_cast<decltype(to)>(grad_up), threads);
    };
    bfloat16 ? call(static_cast<BFloat16 *>(grad_gate)) : call(static_cast<float *>(grad_gate));
}

void copy_blocks_of(const char *const *from, char *const *to, const int64_t *sizes, int64_t blocks, int64_t turn,
                    int64_t piece, int64_t shares, uint64_t step, uint64_t *sums, int threads) {
    copy_blocks(from, to, sizes, blocks, {turn, piece, shares, step}, sums, threads);
}
}
