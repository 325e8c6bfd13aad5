r"""Answers and references with verdicts for the verifier of mathematics, and hostile answers.

A case is what stands in the completion, the reference, and whether it is right. `BOXED` stand in
`\boxed{}`, `WHOLE` are completions.
"""

from __future__ import annotations

Case = tuple[str, object, bool]

NUMBERS: list[Case] = [
    ("18", "18", True),
    ("18", 18, True),
    ("18.0", "18", True),
    ("-5", "−5", True),
    (r"\$18", "18", True),
    (r"\$1,234.50", "1234.5", True),
    ("1,234", "1234", True),
    ("1{,}234", "1234", True),
    (r"1\,234", "1,234", True),
    ("1e3", "1000", True),
    ("18", "x\n#### 18", True),
    ("19", "18", False),
    ("9" * 299, "18", False),
    (r"18\%", "18", True),
    ("18%", "0.18", True),
    ("0.18", r"18\%", True),
    ("18", r"18\%", True),
    (r"180\%", "18", False),
    ("1800%", "18%", False),
    ("18 dollars", "18", True),
    (r"18\text{ dollars}", "18", True),
    ("5 cm", "0.05 m", True),
    (r"5\text{ cm}", r"0.05\text{ m}", True),
    ("5 cm", "5 m", False),
    ("5 m", "5", True),
    ("5", "5 cm", True),
    ("3xyz", "3abc", False),
    ("7 am", "7 pm", False),
    (r"7\text{ a.m.}", "7 a.m.", True),
    ("7 am", "7 p.m.", False),
    (r"5\text{ cm}^2", "5", True),
    ("5 cm²", r"5\text{ cm}^2", True),
    ("500 mm^2", "5 cm^2", True),
    ("5 cm^2", "5 cm", False),
    ("60 km/h", "60", True),
    ("36 square units", "36", True),
    ("31/2", "3 1/2", False),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac12", "1/2", True),
    (r"-\dfrac{1}{2}", r"\frac{-1}{2}", True),
    (r"3\frac{1}{2}", "7/2", True),
    ("3 1/2", "3.5", True),
    (r"\frac{3}{4} \text{ cup}", "3/4", True),
    ("2 1/2", "1", False),
    ("1/3", "0.333333", False),
    ("0.333333", "1/3", False),
    (r"90^\circ", "90", True),
    ("90", r"90^{\circ}", True),
    ("1010_2", "1010_{2}", True),
    ("1010_3", "1010_2", False),
    ("1010", "1010_2", False),
]

NAMED: list[Case] = [
    ("x = 5", "5", True),
    ("5", "x=5", True),
    ("5=x", "5", True),
    ("y=5", "x=5", False),
    ("7=5", "5", False),
    ("18=17", "18", False),
    (r"\pi \approx 3.14", r"\pi", True),
    ("A", "A", True),
    ("(A)", "A", True),
    (r"\text{(B)}", "(B)", True),
    ("B", "A", False),
    (r"\text{Monday}", "Monday", True),
    ("Tuesday", "Monday", False),
    (r"\emptyset", "no solution", True),
    (r"\text{No solution}", r"\emptyset", True),
    ("not 1024, it is 7", "1024", False),
    ("not 7", "7", False),
]

SEVERAL: list[Case] = [
    ("1,2", "2,1", True),
    ("1, 2", r"\{1,2\}", True),
    (r"\{2,1\}", "1,2", True),
    ("1,2", [2, 1], True),
    ("1,234", "1, 234", True),
    (r"x=1 \text{ or } x=2", "1,2", True),
    ("x=1,y=2", "y=2,x=1", True),
    ("x=2,y=1", "x=1,y=2", False),
    (r"\pm 2", "-2,2", True),
    ("2,-2", r"\pm 2", True),
    ("(1,2),(3,4)", "(3,4),(1,2)", True),
    ("(18,17)", "(17,18)", False),
    ("1", "1,2", False),
    ("1,2,3", "1,2", False),
    ("1,1", "1,2", False),
    ("16,17,18", "18", False),
    (r"\{16,17,18\}", "18", False),
    ("16 or 17 or 18", "18", False),
    (r"16\text{ or }18", "18", False),
    ("16;17;18", "18", False),
    ("1 17", "18", False),
    ("17/18", "18", False),
    (r"17\pm1", "18", False),
]

ALGEBRA: list[Case] = [
    ("9*2=18", "18", True),
    ("2", r"2\pi", False),
    ("5x", "5", False),
    ("5", "5m", False),
    (r"\sqrt{25}", "5", True),
    (r"2\sqrt{2}", r"\sqrt{8}", True),
    ("√8", r"2\sqrt2", True),
    (r"\frac \pi4", r"0.25\pi", True),
    ("2pi", r"2\pi", True),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", True),
    ("1.414214", r"\sqrt{2}", False),
    ("x^2+2x+1", "(x+1)^2", True),
    ("2x+3t", "2x+3", False),
    ("3xy", "3ab", False),
    ("2x-y=-3", "y=2x+3", True),
    ("x^2+y^2=4", "x^2+y^2-4=0", True),
    ("x^2+y^2=5", "x^2+y^2=4", False),
    ("4", "x^2+y^2=4", False),
    (r"x\le 3", r"(-\infty,3]", True),
    (r"(-\infty, 3]", r"x \leq 3", True),
    ("x<3", r"(-\infty,3]", False),
    ("[1, 2]", "[1,2)", False),
    ("[17,18]", "18", False),
    ("17<18", "18", False),
    (r"(2,\infty)\cup(-\infty,1)", r"(-\infty, 1) \cup (2, \infty)", True),
    (r"1\pm\sqrt{2}", r"1-\sqrt{2},1+\sqrt{2}", True),
    (r"\begin{pmatrix}1/2\\3\end{pmatrix}", r"\begin{bmatrix}\frac12\\3\end{bmatrix}", True),
    (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", False),
    (r"\begin{pmatrix}1 \\ 2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    (r"\frac{(n+1)!}{n!}", "n+1", True),
    ("(100, 200)", "(100,400/2)", True),
    (r"(\frac12, 3)", "(0.5,3)", True),
    (r"\log_2 8", "3", True),
    (r"\sum_{k=1}^{3} k", "6", True),
    ("(2^2)^3", "64", True),
    ("5!", "120", True),
    ("3+4i", "4i+3", True),
    (r"\frac{0}{0}", "5", False),
    (r"x=17 \vee x=18", "18", False),
    (r"\frac12\vee\frac14", "1/4", False),
    (r"\sqrt{2} \mid \frac14", "1/4", False),
    ("(7=5)", "5", False),
    (r"7\equiv5", "5", False),
    ("17_18", "17", False),
    (r"\frac{1}{", "5", False),
]

BOXED = NUMBERS + NAMED + SEVERAL

WHOLE: list[Case] = [
    ("#### $1,234", "1234", True),
    ("#### 18 eggs", "18", True),
    ("The answer is 18.", "18", True),
    ("A: 18", "18", True),
    ("The answer is 18. She sold 9 twice.", "18", True),
    ("The answer is 17. The answer is not 18.", "18", False),
    ("The answer is 17 or 18.", "18", False),
    ("**Answer:** 18", "18", True),
    ("Final answer: $18$", "18", True),
    ("She has 18 apples.", "18", True),
    ("It could be 16, 17 or 18", "18", False),
    ("16 17 18", "18", False),
    (r"\boxed{17}" "\n\n" r"\boxed{18}", "18", True),
    (r"\boxed{18} then \boxed{17}", "18", False),
    (r"\boxed{17} or \boxed{18}", "18", False),
    (r"\boxed{17}, \boxed{18}", "18", False),
    (r"\boxed{2} and $\boxed{1}$", "1,2", True),
    (r"\boxed{18}, so \boxed{18}", "18", True),
    (r"\boxed{18}, as I was to write it in \boxed{}", "18", True),
    (r"\boxed{\frac{1}{2}", "1/2", True),
    (r"so \boxed{42", "42", True),
    (r"\fbox{17} \boxed{\boxed{18}}", "18", True),
    (r"<think>\boxed{17}</think>\boxed{18}", "18", True),
    (r"<think>\boxed{18}</think>I do not know.", "18", False),
    (r"<think>\boxed{18}", "18", False),
    (r"\boxed{１８}", "18", False),
    ("#### ١٨", "18", False),
    (r"\boxed{}", "18", False),
    ("", "18", False),
]

GUESSES = (
    ("16", "17", "18"), ("x+1", "x+2", "x+3"), (r"\frac12", r"\frac13", r"\frac14"),
    (r"\sqrt2", r"\sqrt3", r"\sqrt5"), ("(1,2)", "(2,3)", "(3,4)"), ("A", "B", "C"),
)  # fmt: skip
SEPARATORS = (
    ",", ";", " ", "\n", " or ", r"\text{ or }", "/", "|", r"\\", "&", "=", "==", r"\lor ",
    r"\vee ", "<", r"\le ", ":", r"\to ", r"\cup ", "...", r"\ldots ", "~", r"\,", "、", "，",
    r"\pm ", r"\neq ", r"\equiv ", r"\Rightarrow ", "{,}", r"\mid ", "_", "^", "%", " not ",
    "}, \\boxed{", "$ or $",
)  # fmt: skip
"""No list of guesses is right, whatever is between them."""

REFUSED = (
    "10^{10^{10}}", "10**10**10", "9^{9^{9^9}}", "((9!)!)!", "(10^8)!", "1001!", "x^{10001}",
    "{" * 41 + "5" + "}" * 41, "1" * 301, r"\{" + ",".join("1" * 65) + r"\}", "1+" * 10**6,
)  # fmt: skip
"""Never read as mathematics."""

EXPLOSIVE = (r"\binom{10^9}{5\cdot 10^8}", r"(x+1)^{9999}-(x+2)^{9999}", "(" * 39 + "x" + ")" * 39)
"""Not to be computed in any time."""

INJECTED = (
    "__import__('os').system('touch {}')",
    "open('{}','w')",
    r"\text{{__import__('pathlib').Path('{}').touch()}}",
    "x.__class__.__mro__[1]",
)
"""Python, in case somebody evaluates it; it makes a file."""

BAD_REFERENCES: tuple[object, ...] = (
    None,
    {"a": 1},
    "",
    " $ ",
    r"\frac{1}{",
    "??",
    "\\",
    "9^{9^{9}}",
    "x" * 400,
    "１８",
)
GOOD_REFERENCES = ("18", 18, 0.5, "A", "no solution", "1010_2", "(1,2]", [1, 2], r"x^2+1", "3:4")
