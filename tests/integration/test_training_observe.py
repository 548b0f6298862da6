"""Real training loops watched in this process: what is counted, where time goes, and what callers must not notice."""

from __future__ import annotations

import inspect
import io
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from workbench import blackbox
from workbench.blackbox import SIZE, Activity, StepRecord, Writer, iter_steps, read_header, read_steps
from workbench.training import observe
from workbench.training.observe import Observer

SIZES = [4, 4, 2]  # of the batches of ten samples


class Watched:
    """An observer over a box in this process, and what the box holds."""

    def __init__(self) -> None:
        self.buffer = bytearray(SIZE)
        blackbox.format_box(self.buffer)
        self.box = Writer(self.buffer)
        self.observer = observe.install(self.box, offset=0.0)

    def records(self) -> list[StepRecord]:
        return list(iter_steps(read_steps(self.buffer, 0)[0]))

    @property
    def activity(self) -> Activity:
        return read_header(self.buffer).activity

    def samples(self) -> list[float]:
        return [record.samples for record in self.records()]


@pytest.fixture
def watched() -> Iterator[Watched]:
    assert Observer.current is None
    made = Watched()
    yield made
    made.observer.uninstall()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(10, 3), torch.ones(10, 1)), batch_size=4, **options)


class Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": f"s{index}", "x": torch.ones(3)}


def tensors(batch: list[Any]) -> Any:
    return torch.stack([item[0] for item in batch])


LOADERS: dict[str, tuple[Callable[[], DataLoader[Any]], Callable[[Any], Any]]] = {
    "list": (loader, lambda batch: batch[0]),
    "tensor": (lambda: loader(collate_fn=tensors), lambda batch: batch),
    "dict": (lambda: DataLoader(Dicts(), batch_size=4), lambda batch: batch["x"]),
    "workers": (lambda: loader(num_workers=2), lambda batch: batch[0]),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_steps_and_samples(watched: Watched, model: nn.Module, kind: str) -> None:
    make, inputs = LOADERS[kind]
    optimizer = sgd(model)
    for batch in make():
        optimizer.zero_grad()
        model(inputs(batch)).sum().backward()
        optimizer.step()
    assert watched.samples() == SIZES
    assert [record.step for record in watched.records()] == [1, 2, 3]
    assert read_header(watched.buffer).step == 3 and watched.activity is Activity.RUNNING


def test_gradient_accumulation_is_one_step(watched: Watched, model: nn.Module) -> None:
    optimizer = sgd(model)
    for number, (x, _) in enumerate(loader()):
        model(x).sum().backward()
        if number == 2:
            optimizer.step()
    assert watched.samples() == [10]


def test_an_evaluation_counts_nothing(watched: Watched, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(2):
        for x, _ in loader():
            model(x).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for x, _ in loader():
                model(x)
        with torch.inference_mode():
            for x, _ in loader():
                model(x)
        for x, _ in loader():  # with gradients on, but nothing is learnt from it
            model(x)
    assert watched.samples() == SIZES * 2


def test_two_optimizers_count_once(watched: Watched) -> None:
    models = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizers = [sgd(each) for each in models]
    for x, _ in loader():
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert len(watched.records()) == 3


def test_another_optimizer_takes_over_when_the_first_dies(watched: Watched, model: nn.Module) -> None:
    for _ in range(3):
        optimizer = sgd(model)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        del optimizer
    assert len(watched.records()) == 6


def test_another_optimizer_takes_over_when_the_first_rests(watched: Watched, model: nn.Module) -> None:
    first, second = sgd(model), sgd(model)
    for optimizer in (first, *[second] * 4):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert len(watched.records()) >= 4


def test_a_closure_optimizer_is_one_step(watched: Watched, model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    (record,) = watched.records()
    assert record.backward > 0 and record.optimizer > 0


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return torch.ones(3)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.003)
        copied: torch.Tensor = x.clone()
        return copied

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(0.005)
        return grads[0]


def test_time_goes_where_it_is_spent(watched: Watched, model: nn.Module, tmp_path: Any) -> None:
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *args: time.sleep(0.002))
    for x in DataLoader(Slow(), batch_size=1):
        SlowBackward.apply(model(x)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.save(model.state_dict(), tmp_path / "model.pt")
    for record in watched.records()[1:]:
        shares = record[3:9]
        assert record.data >= 0.004 and record.forward >= 0.003 and record.backward >= 0.005
        assert record.optimizer >= 0.002 and record.checkpoint > 0 and record.comm == 0
        assert min(shares) >= 0 and sum(shares) <= record.duration * 1.001
        assert sum(shares) >= record.duration * 0.8
    ends = [record.end for record in watched.records()]
    for record, (before, after) in zip(watched.records()[1:], itertools.pairwise(ends), strict=True):
        assert record.duration == pytest.approx(after - before)


class SlowSgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(0.005)  # longer than a step that is watched in part only
        return super().step(closure)


def test_a_step_within_a_step_counts_once(watched: Watched, model: nn.Module) -> None:
    sgd(model)  # from the first object on torch calls the hooks for SGD.step, which SlowSgd.step calls
    optimizer = SlowSgd(model.parameters(), lr=0.01)
    for x, _ in loader():
        model(x).sum().backward()
        optimizer.step()
    assert watched.samples() == SIZES
    assert all(record.optimizer >= 0.005 for record in watched.records())


@pytest.mark.parametrize("how", ["method", "function"])
def test_both_ways_to_begin_a_backward(watched: Watched, model: nn.Module, how: str) -> None:
    optimizer = sgd(model)
    for x, _ in loader():
        loss = model(x).sum()
        loss.backward() if how == "method" else torch.autograd.backward([loss])
        optimizer.step()
    assert watched.samples() == SIZES and all(record.backward > 0 for record in watched.records())


PUBLIC: list[tuple[Any, str]] = [
    (torch, "save"),
    (torch.Tensor, "backward"),
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (torch.optim.SGD, "step"),
    (torch.optim.Optimizer, "__init__"),
    (DataLoader, "__iter__"),
    (nn.parallel.DistributedDataParallel, "forward"),
    (torch.distributed, "all_reduce"),
    (torch.distributed, "init_process_group"),
    (torch.distributed, "send"),
    (torch.distributed, "barrier"),
]


def seen_from_outside() -> list[Any]:
    return [
        (str(inspect.signature(getattr(o, n))), getattr(o, n).__name__, getattr(o, n).__doc__, getattr(o, n).__module__)
        for o, n in PUBLIC
    ]


def places() -> dict[str, Any]:
    """Every attribute that could be replaced."""
    from torch.distributed import distributed_c10d as c10d
    from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

    owners = [torch, torch.serialization, torch.autograd, torch.Tensor, torch.optim.Optimizer, torch.optim.SGD, c10d]
    owners += [torch.distributed, torch.distributed.Work, nn.parallel.DistributedDataParallel, _BaseDataLoaderIter]
    owners += [_SingleProcessDataLoaderIter, DataLoader]
    found = {f"{o}.{name}": value for o in owners for name, value in vars(o).items() if callable(value)}
    cells = {
        f"{key} {index}": cell.cell_contents
        for key, value in found.items()
        for index, cell in enumerate(getattr(value, "__closure__", None) or ())
        if not isinstance(cell.cell_contents, (dict, list, set))
    }
    return found | cells


def test_signatures_stay_and_uninstall_puts_everything_back() -> None:
    outside, before = seen_from_outside(), places()
    made = Watched()
    assert seen_from_outside() == outside
    assert any(places().get(key) is not value for key, value in before.items()), "nothing was watched"
    made.observer.uninstall()
    after = places()
    assert [key for key, value in before.items() if after.get(key) is not value] == []
    assert Observer.current is None


def test_nothing_is_written_after_uninstall(model: nn.Module) -> None:
    made = Watched()
    made.observer.uninstall()
    before = bytes(made.buffer)
    optimizer = sgd(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert bytes(made.buffer) == before


def test_a_second_install_is_the_first(watched: Watched) -> None:
    assert observe.install(watched.box, offset=5.0) is watched.observer


def test_batches_models_and_optimizers_are_pickled_as_ever(watched: Watched, model: nn.Module) -> None:
    batch = next(iter(loader()))
    optimizer = sgd(model)
    for value in (batch, model, optimizer.state_dict()):
        assert b"workbench" not in pickle.dumps(value)
    assert type(batch) is list and type(batch[0]) is torch.Tensor
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save


def test_a_compiled_model_is_one_graph_and_is_counted(watched: Watched, model: nn.Module) -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = sgd(model)
    for x, _ in loader():
        compiled(x).sum().backward()
        optimizer.step()
    assert watched.samples() == SIZES
    torch._dynamo.reset()


class BadBatchError(Exception):
    pass


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise BadBatchError
        return torch.ones(3)


class BrokenBackward(SlowBackward):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise BadBatchError


def test_an_exception_of_the_users_passes_and_leaves_the_watch_whole(watched: Watched, model: nn.Module) -> None:
    with pytest.raises(BadBatchError):
        list(DataLoader(Broken(), batch_size=1))
    assert watched.activity is Activity.RUNNING
    with pytest.raises(BadBatchError):
        BrokenBackward.apply(model(torch.ones(1, 3))).sum().backward()  # type: ignore[no-untyped-call]
    assert watched.activity in (Activity.RUNNING, Activity.FORWARD)
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(_refuse)
    with pytest.raises(BadBatchError):
        optimizer.step()
    good = sgd(model)
    for x, _ in loader():
        model(x).sum().backward()
        good.step()
    assert watched.samples() == SIZES and watched.activity is Activity.RUNNING
    for record in watched.records():
        assert min(record[3:9]) >= 0 and sum(record[3:9]) <= record.duration * 1.001


def _refuse(*args: Any) -> None:
    raise BadBatchError


@pytest.mark.parametrize("method", ["record", "now"])
def test_a_probe_that_fails_switches_all_off_and_training_goes_on(
    watched: Watched, model: nn.Module, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: float) -> None:
        raise OSError("the box is gone")

    setattr(watched.box, method, broken)
    optimizer = sgd(model)
    batches = 0
    for x, _ in loader():
        model(x).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), io.BytesIO())
        batches += 1
    assert batches == 3
    assert capsys.readouterr().err == "dtrain: this rank is no longer watched: OSError: the box is gone\n"


def test_the_same_in_a_short_step(watched: Watched, model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer, batches = sgd(model), 0
    for _ in range(20):
        for x, _ in loader():
            model(x).sum().backward()
            if batches > 40 and watched.observer.is_plain:
                watched.observer.row = len(watched.buffer)  # beyond its end, in words
            optimizer.step()
            batches += 1
    assert batches == 60 and watched.observer.thread == observe.NOBODY
    assert capsys.readouterr().err.startswith("dtrain: this rank is no longer watched: IndexError")


def test_another_thread_of_the_user_is_not_the_rank(watched: Watched, model: nn.Module) -> None:
    optimizer = sgd(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    thread = threading.Thread(target=lambda: list(loader()))
    before = bytes(watched.buffer)
    thread.start()
    thread.join()
    assert bytes(watched.buffer) == before


def test_the_watch_goes_with_its_clock_to_another_thread(watched: Watched, model: nn.Module) -> None:
    optimizer = sgd(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()

    def train() -> None:
        for _ in range(observe.EACH):
            for x, _ in loader():
                model(x).sum().backward()
                optimizer.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert len(watched.records()) == 1 + 3 * observe.EACH
    assert watched.samples()[-3:] == SIZES


def test_what_few_short_steps_have_is_counted_too(watched: Watched, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(observe.EACH):
        for x, _ in loader():
            model(x).sum().backward()
            watched.observer.report("tokens", 7.0)
            optimizer.step()
            watched.observer.report("loss", 0.5)
            torch.save(model.state_dict(), io.BytesIO())
    for record in watched.records()[1:]:
        assert (record.tokens, record.loss) == (7.0, 0.5) and record.checkpoint > 0 and record.data > 0
        assert min(record[3:9]) >= 0 and sum(record[3:9]) <= record.duration * 1.001
    assert watched.samples() == SIZES * observe.EACH


def test_what_is_skipped_or_uneven_among_short_steps_counts_as_it_is(watched: Watched, model: nn.Module) -> None:
    """Batches whose size only a look tells, a batch that nothing is learnt from, and gradients that add up."""
    optimizer = sgd(model)
    sizes = [1 + number % 3 for number in range(3 * observe.EACH)]
    uneven = DataLoader([torch.ones(size, 3) for size in sizes], batch_size=None)
    expected, open_batches = [], 0
    for number, x in enumerate(uneven):
        if number % 7 == 3:
            continue
        model(x).sum().backward()
        open_batches += len(x)
        if number % 5 != 2:
            optimizer.step()
            expected.append(float(open_batches))
            open_batches = 0
    assert watched.samples() == expected


def test_an_optimizer_within_another_counts_once_in_short_steps_too(watched: Watched, model: nn.Module) -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    optimizer = Outer(model.parameters(), lr=0.01)
    for _ in range(2 * observe.EACH):
        for x, _ in loader():
            model(x).sum().backward()
            optimizer.step()
    assert watched.samples() == SIZES * 2 * observe.EACH


def test_the_hook_before_a_step_comes_and_goes(watched: Watched, model: nn.Module) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    optimizer, seen = sgd(model), set()
    for _ in range(observe.EACH):
        for x, _ in loader():
            model(x).sum().backward()
            seen.add((watched.observer.is_whole, *(hook.__name__ for hook in hooks.values())))
            optimizer.step()
    assert {(True, "before"), (False, "pass_by")} <= seen
    assert sum(record.optimizer > 0 for record in watched.records()) == 3 * observe.EACH


def test_two_loaders_side_by_side_add_up(watched: Watched, model: nn.Module) -> None:
    optimizer = sgd(model)
    for (x, _), (y, _) in zip(loader(), loader(), strict=True):
        (model(x).sum() + model(y).sum()).backward()
        optimizer.step()
    assert watched.samples() == [8, 8, 4]


def test_a_loop_without_a_loader_has_no_samples(watched: Watched, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert watched.samples() == [0, 0, 0]


def test_more_steps_than_the_box_holds(watched: Watched) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.zeros(1)
    for _ in range(blackbox.CAPACITY + 10):
        optimizer.step()
    block, head, lost = read_steps(watched.buffer, 0)
    assert head == blackbox.CAPACITY + 10 and lost == 11
    assert [r.step for r in iter_steps(block)][-1] == head


def test_short_steps_are_exact_in_count_samples_and_time(watched: Watched) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    long_loader = DataLoader(TensorDataset(torch.ones(203, 1)), batch_size=2)
    for (x,) in long_loader:
        (x * parameter).sum().backward()
        optimizer.step()
    records = watched.records()
    assert [record.step for record in records] == list(range(1, 103))
    assert watched.samples() == [2.0] * 101 + [1.0]
    assert read_header(watched.buffer).step == 102
    for before, after in itertools.pairwise(records):
        assert after.duration == pytest.approx(after.end - before.end)
        assert after.data > 0 and after.backward > 0 and sum(after[3:9]) <= after.duration * 1.001


def test_a_report_after_a_short_step_is_the_steps(watched: Watched, model: nn.Module) -> None:
    from workbench.training.run import Run

    optimizer, run = sgd(model), Run(watched.observer)
    for number in range(20):
        for x, _ in itertools.islice(loader(), 1):
            model(x).sum().backward()
            optimizer.step()
            run.report(loss=float(number))
    assert [record.loss for record in watched.records()] == [float(number) for number in range(20)]
