r"""Kinds of answers that were once paid wrongly or refused wrongly: what is read once is not read again in another way.

Each line has a truth, then answers behind `;;`.
"""

import importlib.util

import pytest

from coalign_graders.layout import simplify_notation
from coalign_graders.math_answer import is_same_answer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the extra [math]")

WRONG = {
    "exact values": r"""
        2^{100}-1 ;; 2^{100} ;; 2^{100}-2 ;; 1.267651
        100!-1 ;; 100! ;; 100!+1
        123456789012345678901234567890 ;; 123456789012345678901234567891
        \sqrt{10^{60}+1} ;; 10^{30}
        1-10^{-30} ;; 1 ;; 1-10^{-31}
        \sqrt{2}+10^{40} ;; \sqrt{3}+10^{40}
        \sin(10^{-30}) ;; 10^{-30}
        x+2^{100} ;; x+2^{100}-1
        y=x+10^{-40} ;; y=x
        x \ge 10^{30}+1 ;; x \ge 10^{30}
        (2^{100}, 1) ;; (2^{100}-1, 1)
        \lfloor \pi \cdot 10^{30} \rfloor ;; \lfloor \pi \cdot 10^{30} \rfloor + 1
        0.1 ;; 0.10000000000000000000000000001
        """,
    "near values": r"""
        P(X>3) \approx 0.12 ;; 0.99 ;; P(X>3) \approx 0.99 ;; \approx 0.13 ;; P(X>2) \approx 0.12 ;; P(X>3) ;; 3
        \sqrt{51} \approx 7.14 ;; \sqrt{51} \approx 7.24 ;; \sqrt{15} \approx 7.14 ;; 7.15 ;; \sqrt{15}
        t = \frac{\ln 2}{0.05} \approx 13.86 ;; 13.68 ;; \frac{\ln 2}{0.5} ;; t \neq \frac{\ln 2}{0.05} \approx 13.86
        \frac{dy}{dx} \approx 2.5 ;; 7 ;; \frac{dy}{dx} \approx 5.2
        x^2 \approx 3.2 ;; 9.9 ;; x^2 \approx 9.9
        10\pi \approx 31.4 ;; 10e \approx 27.2 ;; 10e
        5 ;; about 5 ;; \approx 5.4 ;; ~5
        """,
    "grouped digits": r"""
        1,000,000 ;; 1,000 ;; 1 ;; 0, 1
        771,400 ;; 400,771 ;; 771 ;; 400, 771
        \$2,500 ;; 500, 2
        (100,200) ;; (200,100) ;; 100200 ;; 100,201
        1,000, 2,000 ;; 0, 1, 2 ;; 1,000, 2,001
        1,000 < x < 2,000 ;; 1 < x < 2
        100,100 ;; 100
        1,000 ;; 1.000 ;; 1, 000
        """,
    "labels": r"""
        5 red, 3 blue ;; 3 red, 5 blue ;; 3, 5 ;; 5 blue and 3 red
        12 \text{ boys and } 15 \text{ girls} ;; 15 \text{ boys and } 12 \text{ girls}
        Alice: 5, Bob: 3 ;; Alice: 3, Bob: 5
        5 apples, 3 green apples ;; 3 apples, 5 green apples
        3 hours 20 minutes ;; 20 hours 3 minutes ;; 20, 3
        12 red balls ;; 12 blue balls
        (1,2) ;; y=1, x=2
        """,
    "sets": r"""
        \{x \mid x>2\} \text{ and } \{x \mid x<5\} ;; (2,5) ;; 2<x<5
        \{1,2\}, \{3,4\} ;; 1,2,3,4 ;; \{1,3\}, \{2,4\}
        2, 2, 3 ;; 2, 3 ;; 2, 3, 3
        p \land q ;; p \lor q
        Alice and Bob ;; Alice or Bob
        x \in [-2,7] ;; y \in [-2,7]
        |x|>1 ;; x>1 ;; (1,\infty)
        |2x-1| \le 5 ;; [-3,2] ;; |2y-1| \le 5
        """,
    "steps and moduli": r"""
        \lceil x \rceil ;; \lfloor x \rfloor + 1 ;; x
        \lceil n/2 \rceil ;; \lfloor n/2 \rfloor + 1
        \lfloor 2x \rfloor ;; 2\lfloor x \rfloor
        |xy| ;; xy
        |x|+|y| ;; |x+y|
        \sqrt{x^2+2x+1} ;; x+1
        \sqrt[6]{x^2} ;; \sqrt[3]{x}
        \max(a,b) ;; a ;; b
        """,
    "units": r"""
        5 dozen ;; 5
        5 ;; 5 dozen ;; 5 score ;; 5 tenths ;; five dozen
        5\text{ N} ;; 5\text{ J} ;; 5\text{ kN}
        5\text{ MW} ;; 5\text{ mW}
        5\text{ gallons} ;; 5\text{ liters}
        20^\circ\text{C} ;; 20^\circ\text{F}
        12 per day ;; 12 per hour
        5 apples ;; 5 oranges
        """,
    "unfinished": r"""
        \frac{x^3}{3} ;; \int x^2 dx
        \frac{\pi}{4} ;; \int_0^1 \frac{1}{1+x^2} dx
        \frac{n(n+1)}{2} ;; \sum_{k=1}^{n} k
        2x ;; \frac{d}{dx} x^2 ;; \frac{d}{dx}(x^2)
        n! ;; \prod_{k=1}^n k
        """,
    "letters": r"""
        n^2 \text{ for } n \text{ odd} ;; n^2 \text{ for } n \text{ even}
        \operatorname{sgn}(x) ;; \operatorname{sgn}(-x)
        \angle ABC ;; \angle ACB
        \log_2 3 ;; \log_20 3
        e^{\ln x} ;; e^{\log_2 x}
        """,
}
RIGHT = {
    "exact values": r"""
        2^{100}-1 ;; 1267650600228229401496703205375 ;; (2^{50}-1)(2^{50}+1)
        \sqrt{2}+\sqrt{3} ;; \sqrt{5+2\sqrt{6}}
        \cos 36^\circ ;; \frac{1+\sqrt5}{4}
        \sqrt[3]{-5} ;; -\sqrt[3]{5}
        \sqrt{17} ;; 4.123106
        """,
    "near values": r"""
        P(X>3) \approx 0.12 ;; 0.12 ;; \approx 0.12 ;; P(X > 3) = 0.12 ;; P(X>3)\approx 0.12
        P(X>3) = 0.12 ;; 0.12 ;; \frac{3}{25}
        \sqrt{51} \approx 7.14 ;; \sqrt{51} ;; 7.14 ;; \sqrt{51} \approx 7.141
        t = \frac{\ln 2}{0.05} \approx 13.86 ;; 20\ln 2 ;; t \approx 13.86
        \sin\theta \approx 0.6 ;; 0.6
        \text{approximately } 3.7 ;; 3.7
        """,
    "grouped digits": r"""
        1,000,000 ;; 1000000 ;; 10^6 ;; 1{,}000{,}000 ;; 1\,000\,000
        (100,200) ;; (100, 200)
        \{100,200\} ;; \{200, 100\}
        1,000, 2,000 ;; 2000, 1000
        1,75 ;; 1.75
        """,
    "labels": r"""
        5 red, 3 blue ;; 3 blue, 5 red ;; 5, 3 ;; 5 red balls and 3 blue balls ;; blue: 3, red: 5
        12 \text{ boys and } 15 \text{ girls} ;; 15 \text{ girls}, 12 \text{ boys}
        3 hours 20 minutes ;; 3 hr 20 min ;; 20 minutes, 3 hours
        (1,2) ;; y=2, x=1 ;; x=1, y=2
        """,
    "sets": r"""
        \{x \mid x>2\} ;; x>2 ;; (2,\infty)
        |x|>1 ;; x<-1 \text{ or } x>1 ;; (-\infty,-1)\cup(1,\infty) ;; 1<|x|
        (-3,3) ;; |x|<3 ;; -3<x<3
        |2x-1| \le 5 ;; [-2,3] ;; |1-2x| \le 5
        1, 2 ;; \{1,1,2\} ;; 2, 1
        (-\infty,0)\cup(2,\infty) ;; x\in(-\infty,0) \text{ or } x\in(2,\infty)
        """,
    "steps and moduli": r"""
        \lceil n/2 \rceil ;; \lfloor \frac{n+1}{2} \rfloor
        \lceil x \rceil ;; -\lfloor -x \rfloor
        |x-y| ;; |y-x|
        \sqrt{x}\sqrt{x+1} ;; \sqrt{x(x+1)}
        \ln(x^2) ;; 2\ln x
        (-1)^n ;; (-1)^{n+2} ;; \cos(n\pi)
        \frac{x^2-4}{x-2} ;; x+2
        """,
    "units": r"""
        5 dozen ;; 60 ;; 5 dozen eggs
        \frac23 ;; two thirds ;; 2 thirds ;; two-thirds
        5 ;; \text{5 apples} ;; 5\text{ cm} ;; \text{The answer is } 5
        5\text{ kJ} ;; 5 kilojoules
        20^\circ\text{C} ;; 20 degrees Celsius
        """,
    "characters": r"""
        12 ;; １２
        (1, 2) ;; （１，２）
        50\% ;; ５０％
        x^4 ;; x⁴
        1011_2 ;; 1011₂
        1.5 ;; 1½
        \theta ;; θ
        """,
}


def read_lines(family):
    lines = [[part.strip() for part in line.split(";;")] for line in family.strip().splitlines()]
    return [(gold, answer) for gold, *answers in lines for answer in answers]


@pytest.mark.parametrize("family", WRONG.values(), ids=WRONG)
def test_what_one_reading_refuses_no_other_pays(family):
    assert not [pair for pair in read_lines(family) if is_same_answer(*pair)]


@pytest.mark.parametrize("family", RIGHT.values(), ids=RIGHT)
def test_other_notations_are_paid(family):
    assert not [pair for pair in read_lines(family) if not is_same_answer(*pair)]


@pytest.mark.parametrize(
    ("text", "simple"),
    [
        ("1,000", "1000"),
        ("x=1,234,567.5", "x=1234567.5"),
        ("0,100", "0,100"),
        ("1000,200", "1000,200"),
        ("1,2,345", "1,2,345"),
        ("(1,000)", "(1000)"),
        ("(1,000, 2)", "(1000, 2)"),
        ("(100,200)", "(100,200)"),
        (r"\frac{1,000}{3}", r"\frac{1000}{3}"),
        ("1011_2,110_2", "1011_2,110_2"),
        ("2{,}5", "2.5"),
    ],
)
def test_grouped_digits_are_one_number_unless_a_list_is_certain(text, simple):
    assert simplify_notation(text) == simple
