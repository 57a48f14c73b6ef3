import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from joblib.externals.loky import get_reusable_executor
from torch import Tensor

from esper.config import build_environment
from esper.data import ImageData, ImageVariant
from esper.environment import Environment, EpisodeStart, WorkerLostError, parallel, transfer
from esper.environment.host_run import HostRun, StepPlan
from esper.environment.host_runs import LocalRuns, RunOrigin
from esper.environment.parallel import place_runs
from esper.environment.transfer import dump_run, dump_shared, load_run, load_shared
from esper.environment.worker_runs import WorkerRuns
from esper.growth import GrowingHost, Mode, SeedSetting
from esper.lifecycle import Blend
from tests.environment.test_environment import is_equal, rows, run_random
from tests.fixtures_environment import SMALL, config, environment, text_config
from tests.fixtures_process import TIMEOUT
from tests.lifecycle.fixtures_slots import act
from tests.test_run import TINY, read_metrics, read_weights, start, wait_for_round

pytestmark = pytest.mark.xdist_group("workers")
WORKERS = ("environment.workers=2", "environment.envs=3")
WAIT = {"op": "WAIT"}


@pytest.fixture(scope="module")
def workers() -> Iterator[Environment]:
    env = environment(*WORKERS)
    yield env
    env.close()


def weights(model: GrowingHost) -> list[Tensor]:
    return [value for _, value in sorted(model.state_dict().items())]


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_episodes_in_workers_are_bit_equal_to_those_in_threads_and_in_one_thread(workers: Environment) -> None:
    threads = environment("environment.threads=2", "environment.envs=3")
    single = environment("environment.envs=3")
    played = [run_random(env, [11, 5, 7], steps=10) for env in (workers, threads, single)]
    for env in range(3):
        assert is_equal(rows(played[0], env), rows(played[1], env))
        assert is_equal(rows(played[0], env), rows(played[2], env))
        assert all_equal(weights(workers.model(env)), weights(single.model(env)))
    tested, expected = workers.test(), single.test()
    assert all(torch.equal(tested[name], expected[name]) for name in expected)
    assert all_equal(list(workers.flops_spent().values()), list(single.flops_spent().values()))
    assert {seed for env in range(3) for seed in single.model(env).seeds}, "some seeds have grown"
    threads.close()


def test_an_episode_in_a_worker_depends_neither_on_other_episodes_nor_on_an_interrupted_round(
    workers: Environment,
) -> None:
    first = rows(run_random(workers, [11, 5, 7]), 1)
    workers.reset([1, 2, 3])
    assert is_equal(first, rows(run_random(workers, [5]), 0))


def test_text_hosts_with_dropout_and_several_hosts_are_bit_equal_in_workers() -> None:
    for composed in (partial(text_config, "host.dropout=0.2"), partial(config, "host=cifar_mixed")):
        env, single = build_environment(composed(*WORKERS)), build_environment(composed("environment.envs=3"))
        assert isinstance(single._runs, LocalRuns)
        seeds = [*env.host_pool.episode_seeds("test", 0, 0), 9]
        assert len({env.host_pool.host_name(seed) for seed in seeds}) == len(env.host_pool)
        one, other = (run_random(each, seeds, steps=4) for each in (env, single))
        assert all(is_equal(rows(one, index), rows(other, index)) for index in range(len(seeds)))
        env.close()


def test_a_rollback_in_a_worker_is_that_of_one_process() -> None:
    overrides = ("optimizer.build.lr=1e12", "optimizer.clip=null", "optimizer.schedule.warmup=0.0")
    env, single = environment(*overrides, *WORKERS), environment(*overrides, "environment.envs=3")
    one, other = (run_random(each, [1, 2, 3], steps=5) for each in (env, single))
    assert any(step.record.rollback.any() for step in other)
    assert all(is_equal(rows(one, index), rows(other, index)) for index in range(3))
    env.close()


def test_starts_with_fossils_are_bit_equal_in_workers(workers: Environment) -> None:
    fossils = {"block1": ("conv_light", "ADD"), "block3": ("norm", "GATED")}
    starts = [EpisodeStart(fossils=fossils), EpisodeStart(fossils=fossils, frozen=True), EpisodeStart(batches=4)]
    single = environment("environment.envs=3")
    losses = []
    for env in (workers, single):
        env.reset([1, 2, 3], starts)
        losses.append([env.step(act(env.space, WAIT, WAIT, WAIT)).record.now.loss for _ in range(3)])
    assert all_equal(*losses)
    assert all_equal(weights(workers.model(1)), weights(single.model(1)))


def evaluate() -> partial[Tensor]:
    return partial(HostRun.evaluate, settings={}, split="validation")


def test_an_idle_worker_takes_a_run_from_a_busy_one(workers: Environment) -> None:
    runs, expected = workers._runs, environment("environment.envs=2")
    assert isinstance(runs, WorkerRuns)
    runs.start([RunOrigin(number, "host") for number in (1, 2)])
    alone = [runs.compute({env: evaluate()})[0] for env in (0, 1)]  # the first worker is idle each time
    assert runs._owners[0] is runs._owners[1]
    together = runs.compute({0: evaluate(), 1: evaluate()})
    assert runs._owners[0] is not runs._owners[1]
    expected.reset([1, 2])
    local = [expected.host_run(env).evaluate({}, "validation") for env in (0, 1)]
    assert all_equal(alone, local)
    assert all_equal(together, local)


def test_a_run_continues_bit_exactly_after_a_transfer() -> None:
    env = environment("environment.envs=1")
    env.reset([3], [EpisodeStart(fossils={"block1": ("conv_light", "GATED")})])
    env.step(act(env.space, WAIT))
    run = env.host_run(0)
    copy = load_run(dump_run(run, env.factory.data_sets()), env.factory.data_sets())
    assert copy.model is not run.model
    on = {"block1": SeedSetting(Mode.BLENDED, 1.0)}
    results = [each.train_and_measure(StepPlan(on, on, ("block1",), 3, (0.1, 0.2))) for each in (run, copy)]
    assert torch.equal(results[0].nan_to_num(-1), results[1].nan_to_num(-1))
    assert all_equal(weights(run.model), weights(copy.model))


def test_a_seed_continues_its_warm_up_after_a_transfer() -> None:
    env = environment("environment.envs=1", "optimizer.seed_warmup=0.5")
    env.reset([3])
    run, on = env.host_run(0), {"block1": SeedSetting(Mode.BLENDED, 1.0)}
    run.train_and_measure(StepPlan({}, {}, (), 1, (0.0, 0.1)))
    run.graft("block1", "conv_light", Blend.ADD)
    run.train_and_measure(StepPlan(on, on, (), 2, (0.1, 0.2)))
    copy = load_run(dump_run(run, env.factory.data_sets()), env.factory.data_sets())
    copy.train_and_measure(StepPlan(on, on, (), 1, (0.2, 0.3)))
    rates = {group["owner"]: group["lr"] for group in copy.optimizer.torch.param_groups}
    assert copy.optimizer.seed_starts == {"block1": 0.1}
    assert rates["block1"] / rates["host"] == pytest.approx(0.2)  # a fifth of the warm-up has passed


def test_data_is_shared_with_workers_and_not_copied() -> None:
    env = environment()
    content, tensors = dump_shared(env.factory)
    images = env.host_pool.task(0).data.splits["train"].images  # type: ignore[attr-defined]
    assert images.is_shared()
    assert len(content) < images.numel()
    loaded = load_shared(content, tensors)
    assert loaded.data_sets()[0].splits["train"].images.data_ptr() == images.data_ptr()


def test_a_run_on_a_variant_is_bit_equal_in_a_worker_and_in_this_process() -> None:
    env = environment()
    task = env.factory.tasks["host"]
    assert isinstance(task.data, ImageData)
    variant = ImageVariant(task.data, classes=3, colour="grey", label_noise=0.2, train=60, permuted=True, rng_seed=4)
    factory = replace(env.factory, tasks={"host": replace(task, data=variant)})
    here, there = LocalRuns(factory, 1), WorkerRuns(factory, 1)
    results = []
    for runs in (here, there):
        runs.start([RunOrigin(1, "host")])
        trained = runs.compute({0: partial(HostRun.train_and_measure, plan=StepPlan({}, {}, (), 4, (0.0, 0.1)))})
        results.append([*trained, *runs.compute({0: evaluate()})])
    assert is_equal(results[:1], results[1:])
    assert all_equal(weights(here.fetch(0).model), weights(there.fetch(0).model))
    there.close()


def test_an_error_in_a_worker_is_raised_and_the_next_round_runs(workers: Environment) -> None:
    runs = workers._runs
    runs.start([RunOrigin(number, "host") for number in (1, 2, 3)])
    for env in range(3):
        runs.change(env, partial(HostRun.graft, slot="block1", blueprint="unknown", blend=Blend.ADD))
    with pytest.raises(ValueError, match="blueprint=unknown: is unknown among cnn blueprints"):
        runs.compute({env: evaluate() for env in range(3)})
    assert run_random(workers, [1, 2, 3], steps=2)


def test_after_an_interrupt_new_workers_run_the_next_round(
    workers: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_random(workers, [1, 2, 3], steps=2)
    assert isinstance(workers._runs, WorkerRuns)
    before = [worker.process for worker in workers._runs._workers]
    with monkeypatch.context() as patch:
        patch.setattr("esper.environment.worker_runs.wait", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            workers.step(act(workers.space, WAIT, WAIT, WAIT))
    assert not any(process.is_alive() for process in before)
    with pytest.raises(RuntimeError, match="there are no worker processes; call reset first"):
        workers.test()
    again = run_random(workers, [1, 2, 3], steps=2)
    assert all(is_equal(rows(expected, env), rows(again, env)) for env in range(3))


def raise_interrupt(connections: object) -> None:
    raise KeyboardInterrupt


def test_a_killed_worker_raises_one_sentence_and_the_next_round_has_new_workers() -> None:
    env = environment(*WORKERS)
    env.reset([1, 2, 3])
    assert isinstance(env._runs, WorkerRuns)
    lost, other = (worker.process for worker in env._runs._workers)
    os.kill(lost.pid, signal.SIGKILL)
    sentence = rf"^environment.workers: worker 0 \(process {lost.pid}\) was killed by SIGKILL$"
    lost.join()  # between two rounds
    with pytest.raises(WorkerLostError, match=sentence):
        env.reset([1, 2, 3])
    assert not other.is_alive()
    env.reset([1, 2, 3])
    env._runs._workers[1].process.kill()
    with pytest.raises(WorkerLostError, match=r"worker 1 .* was killed by SIGKILL$"):
        env.step(act(env.space, WAIT, WAIT, WAIT))
    env.close()


def test_a_run_that_cannot_be_transferred_raises_its_error(workers: Environment) -> None:
    runs = workers._runs
    assert isinstance(runs, WorkerRuns)
    runs.start([RunOrigin(number, "host") for number in (1, 2)])
    runs.change(0, add_lock)
    with pytest.raises(TypeError, match="cannot pickle"):
        runs.fetch(0)
    assert run_random(workers, [1, 2, 3], steps=1)


def add_lock(run: HostRun) -> None:
    run.model.lock = threading.Lock()


def test_a_data_set_that_does_not_fit_into_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(ValueError, match=r"needs 4 MB of shared memory, but /dev/shm has 1 MB; .*workers=0"):
        dump_shared(torch.zeros(1_000_000))


def losses_in_workers() -> list[float | str]:
    env = environment("environment.workers=1", envs=1)
    env.reset([1])
    losses = env.step(act(env.space, WAIT)).record.now.loss.tolist()
    env.close()
    return [type(env._runs).__name__, *losses]


def test_workers_run_inside_a_job_of_joblib() -> None:
    with get_reusable_executor(max_workers=1) as executor:
        kind, *losses = executor.submit(losses_in_workers).result(timeout=TIMEOUT)
    single = environment(envs=1)
    single.reset([1])
    assert losses == single.step(act(single.space, WAIT)).record.now.loss.tolist()
    assert kind == "WorkerRuns"


@pytest.mark.parametrize(
    ("workers", "cores", "kind", "parallel_runs"),
    [(None, 8, WorkerRuns, 3), (None, 2, WorkerRuns, 2), (None, 1, LocalRuns, 1), (0, 8, LocalRuns, 3),
     (1, 8, WorkerRuns, 1), (64, 2, WorkerRuns, 3)],
)  # fmt: skip
def test_runs_are_placed_by_workers_and_cores(
    workers: int | None, cores: int, kind: type, parallel_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "available_cores", lambda: cores)
    placed = place_runs(environment().factory, 3, workers, None)
    assert type(placed) is kind
    assert placed.parallel == parallel_runs
    placed.close()


def test_impossible_numbers_of_workers_are_refused() -> None:
    factory = environment().factory
    with pytest.raises(ValueError, match=r"environment.workers=-1: must be at least 0, or null\."):
        place_runs(factory, 3, -1, None)
    with pytest.raises(ValueError, match=r"environment.threads=0: must be at least 1, or null\."):
        place_runs(factory, 3, 0, 0)
    factory.data_sets()[0].device = torch.device("cuda:0")
    with pytest.raises(ValueError, match=r"environment.workers=2: must be 0 or null for hosts on cuda:0"):
        place_runs(factory, 3, 2, None)


def children(process: int) -> list[int]:
    """Processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def worker_pids(process: int) -> list[int]:
    """Worker processes of a run; Python also starts a process that tracks shared resources."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children(process)}
    return [child for child, command in commands.items() if "spawn_main" in command]


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def wait_until_gone(processes: list[int]) -> bool:
    until = time.monotonic() + TIMEOUT
    while any(map(is_running, processes)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(is_running, processes))


class WorkerRun:
    """A run with two worker processes, in a session of its own, started as a user types it."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        command = [sys.executable, "-m", "esper.run", *overrides]
        self._process = subprocess.Popen(
            command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def workers(self) -> list[int]:
        return worker_pids(self._process.pid)

    def finish(self, code: int) -> str:
        output, _ = self._process.communicate(timeout=TIMEOUT)
        assert self._process.returncode == code, output
        return output

    def signal_all(self, number: signal.Signals) -> None:
        """Signal every process of the session, as a terminal does."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def test_a_run_that_lost_a_worker_was_interrupted_and_was_killed_resumes_to_the_weights_of_one_process(
    tmp_path: Path,
) -> None:
    whole, directory = tmp_path / "whole", tmp_path / "run"
    start(tmp_path, *TINY, "rounds=24", f"hydra.run.dir={whole}").finish()
    common = (*TINY, "environment.workers=2", "callbacks.checkpoints.every=1", "callbacks.dashboard=null")
    process = WorkerRun(tmp_path, *common, "rounds=24", f"hydra.run.dir={directory}")
    wait_for_round(directory, 1, process)
    workers = process.workers()
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    output = process.finish(code=1)
    assert f"was killed by SIGKILL; resume with python -m esper.run resume={directory}" in output
    assert "Traceback" not in output
    assert wait_until_gone(workers)

    process = WorkerRun(tmp_path, f"resume={directory}")
    wait_for_round(directory, 3, process)
    workers = process.workers()
    process.signal_all(signal.SIGINT)
    output = process.finish(code=0)
    assert "stopped by SIGINT after round" in output
    assert "Traceback" not in output
    assert "was killed" not in output
    assert wait_until_gone(workers)

    process = WorkerRun(tmp_path, f"resume={directory}")
    wait_for_round(directory, 5, process)
    workers = process.workers()
    process.kill()
    process.finish(code=-signal.SIGKILL)
    assert wait_until_gone(workers), "a killed run leaves no worker"

    start(tmp_path, f"resume={directory}", "environment.workers=0").finish()
    resumed, uninterrupted = read_weights(directory), read_weights(whole)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)
    assert read_metrics(directory) == read_metrics(whole)


def test_workers_run_in_a_notebook_with_a_host_and_a_blueprint_defined_there(tmp_path: Path) -> None:
    """Code after -c is a main module without a file, like that of a notebook."""
    code = """
        import torch
        from esper.blueprints import register
        from esper.config import build_environment, compose_config
        from esper.hosts import CNNHost

        @register("cnn", "scale", lambda channels: channels, "one factor per channel")
        class Scale(torch.nn.Module):
            def __init__(self, channels):
                super().__init__()
                self.factor = torch.nn.Parameter(torch.ones(channels, 1, 1))
            def forward(self, x):
                return x * self.factor

        class MyHost(CNNHost):
            pass

        config = compose_config("evaluate", OVERRIDES)
        env = build_environment(config)
        from dataclasses import replace
        from esper.environment import EpisodeStart
        env.factory.tasks["host"] = replace(env.factory.tasks["host"], build=lambda: MyHost(
            blocks=3, channels=4, kernel=1, pools=2, pool_slots=False, resolution=8, classes=10))
        env.reset([1, 2], [EpisodeStart(fossils={"block1": ("scale", "ADD")})] * 2)
        wait = torch.zeros(2, len(env.space.heads), dtype=torch.int64)
        print(type(env._runs).__name__, env.step(wait).record.now.loss.isfinite().all().item())
        print(type(env.model(0).host).__name__)
        env.close()
    """
    script = f"OVERRIDES = {[*SMALL, 'environment.workers=2']}\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.stdout.split() == ["WorkerRuns", "True", "MyHost"], done.stderr
