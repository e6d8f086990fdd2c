"""Shell scripts are read as bash would read them, and nothing of them is started."""

from __future__ import annotations

import pytest

from coalign_migrate.shell.marks import is_known, show
from coalign_migrate.shell.script import ShellScript


def expand(text: str, **environment: str) -> list[str]:
    """The words of the first command that is called `run`, without its name."""
    script = ShellScript(text, "/scripts/run.sh", environment)
    return [show(word) for word in next(command.words[1:] for command in script.commands if command.words[0] == "run")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run a 'b c' \"d e\" f\\ g", ["a", "b c", "d e", "f g"]),
        ("N=3\nrun $N ${N}x '$N' \"$N\" \\$N", ["3", "3x", "$N", "3", "$N"]),
        ("A='x y'\nrun $A \"$A\"", ["x", "y", "x y"]),
        ("run ${A:-b} ${A:-'c d'} ${A-} ${A:+e} end", ["b", "c", "d", "end"]),
        ("A=1\nrun ${A:-b} ${A:+e} ${B:=7} $B", ["1", "e", "7", "7"]),
        ("A=${B:-${C:-deep}}\nrun $A", ["deep"]),
        ("A=P/T.F.sh\nrun ${A,,} ${A^^} ${A%.sh} ${A%%.*} ${A#*/} ${A##*.}", "p/t.f.sh P/T.F.SH P/T.F P/T T.F.sh sh"),
        ("A=a-b-c\nrun ${A/-/+} ${A//-/+} ${A:2} ${A:0:1} ${#A}", ["a+b-c", "a+b+c", "b-c", "a", "5"]),
        ("a=2 b=5\nrun $((a * b + 1)) $(( (a+b)/2 )) $((b % a)) $((a > 1 ? 10 : 20)) $(expr 16 / 4)", "11 3 1 10 4"),
        ('D=( a "b c" # a comment\n  d=\'x\'\n)\nrun "${D[@]}" ${#D[@]} ${D[1]}', ["a", "b c", "d=x", "3", "b", "c"]),
        ('D=(a)\nD+=(b c)\nD+=("${D[@]}")\nrun "${D[@]}"', ["a", "b", "c", "a", "b", "c"]),
        ('E=()\nrun "${E[@]}" "$@" $@ "" z', ["", "z"]),
        ("declare -A M=([k]=v)\nM[w]=5\nrun ${M[k]} ${M[w]}", ["v", "5"]),
        ("run a \\\n  b \\\n  c # no d\nrun e", ["a", "b", "c"]),
        ("run l='[\"console\",\"a\"]' x=\"['$HOME/a', 'b']\"", ['l=["console","a"]', "x=['/root/a', 'b']"]),
        ('if [ "${X:-1}" != 0 ] && [ "${Y:-gpu}" = gpu ]; then R=(uv run); else R=(no); fi\nrun ${R[@]}', "uv run"),
        ("if [[ $Z == a* || -z $Z ]]; then V=1; elif true; then V=2; fi\nrun $V", ["1"]),
        ("case ${D:-gpu} in npu|cpu) V=0;; gpu) V=1;; *) V=2;; esac\nrun $V", ["1"]),
        ("for i in 1 2 3; do L+=(x=$i); done\nrun ${L[@]}", ["x=1", "x=2", "x=3"]),
        ("for i in 1 2 3; do [ $i = 2 ] && break; L+=($i); done\nrun ${L[@]}", ["1"]),
        ("f() { local a=$1; V=$a-$2; }\nf p q\nrun $V", ["p-q"]),
        ("function go { run \"$@\" end; }\ngo 1 '2 3'", ["1", "2 3", "end"]),
        ("read -r -d '' C <<EOF\nrun --a 1 \\\n  --b $HOME\nEOF\n$C", ["--a", "1", "--b", "/root"]),
        ('C="run --a 1"\n$C --b 2', ["--a", "1", "--b", "2"]),
        ('A="--x 1 \\\n --y 2"\neval "run $A"', ["--x", "1", "--y", "2"]),
        ("cd /tmp && echo hi && run ok", ["ok"]),
        ('D=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)\nrun $D $(basename /a/b.sh .sh)', ["/scripts", "b"]),
        ("V=$(python3 -c 'import npu' 2>/dev/null && echo npu || echo gpu)\nrun $V", ["gpu"]),
        ("if [ $# -lt 2 ]; then echo usage; exit 1; fi\nn=$1\nrun $n.", ["$1."]),
        ('[ -z "$NEEDED" ] && exit 1\nrun on', ["on"]),
        ("export A=1 B='2 3'\nreadonly C=4\nrun $A \"$B\" $C", ["1", "2 3", "4"]),
        ("((N = 1)); if (( 2 > 1 )); then V=y; fi\nrun $V", ["y"]),
        ("run a{x,y}b c", ["axb", "ayb", "c"]),
        ("run x=$'a\\nb' 2>&1 | tee log.txt", ["x=a\nb"]),
        ("A=1; B=2 # two\nrun $A$B <(cat x) > out.txt", ["12", "<(cat x)"]),
        ("X=1\n(X=2; cd /)\nrun $X", ["1"]),
    ],
)
def test_words_are_those_of_bash(text, words):
    assert expand(text, HOME="/root") == (words.split() if isinstance(words, str) else words)


def test_variables_of_the_environment_are_used_and_noted():
    assert expand("run ${MODEL:-default}", MODEL="mine") == ["mine"]
    assert ShellScript("run $MODEL", "", {"MODEL": "mine"}).notes == ["MODEL is 'mine' in the environment"]


def test_what_nobody_knows_stays_marked():
    script = ShellScript('run x=$UNSET y=$(date +%F)_a z=$((UNSET * 2)) "$ALONE" $ALONE', "", {})
    words = script.commands[0].words[1:]
    assert [show(word) for word in words] == ["x=$UNSET", "y=$(date +%F)_a", "z=$((UNSET * 2))", "$ALONE"]
    assert not any(map(is_known, words)) and script.notes == ["line 1: $ALONE is not set: it stands for nothing"]


def test_conditions_that_nobody_knows_are_noted():
    script = ShellScript('N=$(nvidia-smi | wc -l)\nif [ "$N" -gt 1 ]; then V=2; else V=1; fi\nrun $V', "", {})
    assert script.commands[-1].words == ("run", "1") and "line 2: whether this `if` holds" in script.notes[0]


def test_a_comment_that_ends_a_command_is_noted():
    script = ShellScript("run a=1 \\\n  # b=2 \\\n  c.d=3\n", "", {})
    assert script.commands[0].words == ("run", "a=1")
    assert "line 3: `c.d=3` begins no command; the one before has ended" in script.notes


def test_files_that_a_script_includes_or_writes(tmp_path):
    (tmp_path / "model.sh").write_text("ARGS=(--layers 3)\n")
    text = f'source "{tmp_path}/model.sh"\ncat > run.yaml <<EOF\nlr: $LR\nEOF\nsource other.sh\nrun "${{ARGS[@]}}"'
    script = ShellScript(text, "", {"LR": "0.1"})
    assert script.commands[-1].words == ("run", "--layers", "3") and script.files == {"run.yaml": "lr: 0.1\n"}
    assert "line 5: other.sh is not read; what it sets is not known" in script.notes


def test_nothing_is_started(tmp_path):
    text = "touch DIR/a; X=$(touch DIR/b); `touch DIR/c`; eval 'touch DIR/d'; echo e > DIR/e; cat <(touch DIR/f)"
    ShellScript(text.replace("DIR", str(tmp_path)), "", {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["run 'a", 'run "a', "run ${a", "if true; then run", "fi", "A=(1", "run )"])
def test_broken_scripts_are_refused(text):
    with pytest.raises(ValueError, match="line 1"):
        ShellScript(text, "", {})


@pytest.mark.parametrize(
    "text", ["f() { f; }\nf", "while true; do run; done", "A=$((9**99999))\nrun", "source x.sh\nrun"]
)
def test_scripts_without_an_end_are_left(text):
    ShellScript(text, "", {})
