"""A Megatron parameter made of whole tensors, and cut as tensor-parallel ranks have it; and the ways back."""

from coalign_megatron.layouts.shards import Shard, ShardBox, cut


def from_hf(parameter, tensors):
    """The full parameter, made of a file's tensors."""
    views = {name: source.read(tensors[name]) for name, source in parameter.sources.items()}
    return next(tensor for _, tensor in cut(views.__getitem__, [parameter.whole])).to(parameter.dtype)


def to_hf(parameter, full):
    """The file's tensors, made of the full parameter; not for one of several stacked experts."""
    found = {}
    for name, source in parameter.sources.items():
        back = tuple(
            ShardBox(parameter.name, piece.local, piece.full) for piece in parameter.pieces if piece.name == name
        )
        views = cut(lambda _: full, [Shard(name, source.shape, parameter.name, back)])
        found[name] = source.write(next(tensor for _, tensor in views))
    return found


def part(parameter, full, index, count):
    """What tensor-parallel rank ``index`` of ``count`` has."""
    shape, boxes = parameter.cut(index, count)
    pieces = tuple(ShardBox(parameter.name, *each) for each in boxes)
    return next(tensor for _, tensor in cut(lambda _: full, [Shard(parameter.name, shape, parameter.name, pieces)]))


def join_parts(parameter, parts):
    full = parts[0].new_zeros(parameter.shape)
    for index, each in enumerate(parts):
        for there, here in parameter.cut(index, len(parts))[1]:
            full[tuple(slice(*ends) for ends in there)] = each[tuple(slice(*ends) for ends in here)]
    return full
