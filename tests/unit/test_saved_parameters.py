"""What of a program can be set from outside, and how it then reads."""

from __future__ import annotations

import pytest

from workbench.errors import UsageError
from workbench.saved.parameters import apply, options, parameters, set_option, set_parameters, sweep
from workbench.verbs.rerun import setting, share

CELL = """\
import torch
# dtrain: parameters
lr = 0.05  # the learning rate
epochs: int = 3
name = "trial"
sizes = [
    1, 2,
]
wide = "ü"; amp = False

model = torch.nn.Linear(1, 1)
later = 1
"""


@pytest.mark.parametrize(
    "mark",
    ["# dtrain: parameters", "# parameters", '# %% tags=["parameters"]', '# + tags=["parameters"]', "#Parameters"],
)
def test_assignments_below_a_mark_are_parameters(mark: str) -> None:
    assert list(parameters(CELL.replace("# dtrain: parameters", mark))) == [
        "lr",
        "epochs",
        "name",
        "sizes",
        "wide",
        "amp",
    ]


def test_without_a_mark_there_are_none() -> None:
    assert parameters("lr = 1\n") == {} and parameters("# dtrain: parameters\nlr = (") == {}
    assert parameters("x = 1  # parameters of it\ny = 2\n") == {}


def test_only_the_values_change() -> None:
    new = set_parameters(CELL, [("lr", "0.1"), ("sizes", "[3]"), ("name", "it's"), ("amp", "true"), ("wide", "x")])
    wanted = CELL.replace("0.05", "0.1").replace('"trial"', '"it\'s"').replace("[\n    1, 2,\n]", "[3]")
    assert new == wanted.replace("amp = False", "amp = True").replace('"ü"', "'x'")


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("lr", "1", "lr = 1.0 "),
        ("epochs", "7", "epochs: int = 7"),
        ("name", "5", "name = '5'"),
        ("lr", "1e-3", "lr = 0.001 "),
    ],
)
def test_values_take_the_type_of_what_they_replace(name: str, value: str, line: str) -> None:
    assert line in set_parameters(CELL, [(name, value)])


@pytest.mark.parametrize(("name", "value"), [("lr", "fast"), ("amp", "3"), ("epochs", "[1]")])
def test_values_that_do_not_fit(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is"):
        set_parameters(CELL, [(name, value)])


SCRIPT = """\
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("-b", "--batch-size", type=int)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
print("--not-one", 3); run(["--nor-this"])
"""


def test_options_are_those_that_calls_declare() -> None:
    found = options([SCRIPT])
    assert {k: v for k, v in found.items() if k != "--not-one"} == {
        "--lr": False, "--batch-size": False, "--amp": True, "--compile": True,
    }  # fmt: skip
    assert options(["def ("]) == {}


@pytest.mark.parametrize(
    ("args", "option", "value", "is_flag", "new"),
    [
        ((), "--lr", "0.1", False, ("--lr", "0.1")),
        (("--lr", "1", "-v"), "--lr", "0.1", False, ("--lr", "0.1", "-v")),
        (("--lr=1",), "--lr", "0.1", False, ("--lr=0.1",)),
        ((), "--lr", "-1", False, ("--lr=-1",)),
        (("--amp",), "--amp", "false", True, ()),
        ((), "--amp", "true", True, ("--amp",)),
    ],
)
def test_arguments_with_another_value(
    args: tuple[str, ...], option: str, value: str, is_flag: bool, new: tuple[str, ...]
) -> None:
    assert set_option(args, option, value, is_flag=is_flag) == new


def test_settings_go_to_marked_names_options_and_words() -> None:
    source, args = apply(CELL, [SCRIPT], ("--seed=1", "data.size=3"), [
        ("epochs", "5"), ("lr", "0.1"), ("batch_size", "8"), ("seed", "2"), ("data.size", "4"),
    ])  # fmt: skip
    assert "epochs: int = 5" in source and "lr = 0.1 " in source
    assert args == ("--seed=2", "data.size=4", "--batch-size", "8")
    with pytest.raises(UsageError, match=r"no parameter 'batchsize'.*did you mean batch-size"):
        apply("", [SCRIPT], (), [("batchsize", "1")])
    with pytest.raises(UsageError, match="dtrain: parameters"):
        apply("", [], (), [("lr", "1")])


def test_a_sweep_is_all_combinations() -> None:
    assert sweep([]) == [()]
    assert sweep([("lr", ["1", "2"]), ("n", ["3", "4"])]) == [
        (("lr", "1"), ("n", "3")), (("lr", "1"), ("n", "4")), (("lr", "2"), ("n", "3")), (("lr", "2"), ("n", "4")),
    ]  # fmt: skip


def test_words_of_the_command_line() -> None:
    assert setting("lr=0.1,0.01") == ("lr", ("0.1", "0.01"))
    assert setting("--sizes=[1,2],[3]") == ("sizes", ("[1,2]", "[3]"))
    assert setting("name='a,b',c") == ("name", ("'a,b'", "c"))
    assert setting("x=") == ("x", ("",))
    for bad in ("lr", "=1"):
        with pytest.raises(ValueError, match="NAME=VALUE"):
            setting(bad)
    assert share("5%") == share("0.05") == 0.05
    for bad in ("x", "-1", "nan%"):
        with pytest.raises(ValueError, match="share"):
            share(bad)
