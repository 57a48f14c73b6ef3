from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from esper.config import build_environment
from esper.controllers import RandomController, ReplayController
from esper.data.images import Labelled
from esper.environment import Environment, EpisodeStart, GrowthStep, StepRecord
from esper.environment.host_run import HostRun, StepPlan
from esper.evaluation.costs import growth_tables
from esper.evaluation.document import ReportTable
from esper.evaluation.results import group_by_task
from esper.growth import Mode, SeedSetting
from esper.lifecycle import Blend, Stage, legal
from esper.observation import HostMeasurements
from esper.records import EpisodeLog, EpisodeRecord, Germination, LineWriter, make_record, read_episodes
from tests.fixtures_environment import environment, text_config
from tests.lifecycle.fixtures_slots import act


def run_random(env: Environment, episode_seeds: list[int], steps: int = 6) -> list[GrowthStep]:
    """Random legal actions; those of an episode depend on its episode seed only."""
    controller = RandomController(env.space)
    observation, memory = env.reset(episode_seeds), controller.begin(episode_seeds)
    result = []
    for _ in range(steps):
        action, memory = controller.act(observation, memory)
        result.append(env.step(action))
        observation = result[-1].observation
    return result


def rows(steps: list[GrowthStep], env: int) -> list[list[Tensor]]:
    """All measurements, observations and rewards of one environment."""
    return [
        [
            *(getattr(step.record.now, name)[env] for name in HostMeasurements.__dataclass_fields__),
            step.observation.base[env],
            step.observation.slots[env],
            step.reward[env],
        ]
        for step in steps
    ]


def is_equal(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return all(torch.equal(torch.nan_to_num(a, -7), torch.nan_to_num(b, -7)) for a, b in pairs)


def test_an_episode_is_bit_equal_with_other_episodes_and_threads() -> None:
    single = rows(run_random(environment(envs=1), [11]), 0)
    assert is_equal(single, rows(run_random(environment(envs=1), [11]), 0))
    assert is_equal(single, rows(run_random(environment(envs=3), [5, 11, 7]), 1))
    threaded = environment("environment.threads=2", envs=3)
    assert is_equal(single, rows(run_random(threaded, [11, 3, 4]), 0))
    threaded.close()
    assert not is_equal(single, rows(run_random(environment(envs=1), [12]), 0))


def test_text_hosts_with_dropout_are_reproducible() -> None:
    composed = text_config("host.dropout=0.2", "environment.threads=2")
    one = run_random(build_environment(composed, 2), [1, 2], steps=4)
    other = run_random(build_environment(composed, 3), [9, 2, 1], steps=4)
    assert is_equal(rows(one, 0), rows(other, 2))
    assert (one[0].record.now.score < 0).all()


def test_thread_count_and_global_generator_are_unchanged() -> None:
    env = environment("environment.threads=2")
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    run_random(env, [1, 2], steps=3)
    assert torch.get_num_threads() == 2
    assert torch.equal(state, torch.get_rng_state())
    torch.set_num_threads(1)


def test_hosts_train_in_inference_mode_and_without_gradients() -> None:
    env = environment()
    plain = rows(run_random(env, [1, 2], steps=3), 0)
    with torch.inference_mode():
        in_inference_mode = rows(run_random(env, [1, 2], steps=3), 0)
    with torch.no_grad():
        without_gradients = rows(run_random(env, [1, 2], steps=3), 0)
    assert is_equal(plain, in_inference_mode)
    assert is_equal(plain, without_gradients)


class ReadCounter(TorchDispatchMode):
    """Counts reads of single values from a tensor; each would synchronise a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


SEEDED = {
    "block1": SeedSetting(Mode.BLENDED, 0.5),
    "block2": SeedSetting(Mode.ISOLATED, 1.0),
    "block3": SeedSetting(Mode.FADING, 0.3),
}


def graft_all_modes(run: HostRun) -> StepPlan:
    """Graft seeds for every mode; return a plan that trains, measures and probes them."""
    for slot, blueprint, blend in zip(SEEDED, ("conv_light", "norm", "depthwise"), Blend, strict=True):
        run.graft(slot, blueprint, blend)
    return StepPlan(SEEDED, SEEDED, ("block1", "block3"), 2, (0.1, 0.2))


def test_training_and_measuring_read_no_value_from_the_device() -> None:
    env = environment()
    env.reset([1, 2])
    plan = graft_all_modes(env.host_run(0))
    with ReadCounter() as reads:
        env.host_run(0).train_and_measure(plan)
    assert reads.count == 0


def test_the_number_of_reads_does_not_depend_on_the_number_of_batches() -> None:
    counts = []
    for batches, batch in ((1, 100), (6, 10)):
        env = environment(f"environment.batches={batches}", f"environment.validation_batch={batch}")
        env.reset([1, 2])
        for _ in range(3):
            can_germinate = legal(env._slots, env.space, env.rules).op[0, 1] and not env.view.step
            with ReadCounter() as reads:
                env.step(act(env.space, {"op": "GERMINATE" if can_germinate else "WAIT"}, {"op": "WAIT"}))
        counts.append(reads.count)  # a step with a blended seed whose contribution is measured
    assert counts[0] == counts[1] <= 20 * env.envs


def test_training_and_measuring_run_on_the_meta_device() -> None:
    env = environment("optimizer.build.fused=false")  # meta has no fused kernel
    data = env.host_pool.task(0).data
    data.splits = {k: Labelled(v.images.to("meta"), v.labels.to("meta")) for k, v in data.splits.items()}
    data._padded, data._mean, data._std = (t.to("meta") for t in (data._padded, data._mean, data._std))
    data.device = torch.device("meta")
    run = HostRun(
        None, build=lambda: env.host_pool.build(0), optimizer=env.factory.optimizer, data=data, options=env._options
    )
    packed = run.train_and_measure(graft_all_modes(run))
    assert (packed.device.type, packed.shape) == ("meta", (6 + 3 * 5,))


def test_a_text_host_trains_and_is_measured_on_the_meta_device() -> None:
    env = build_environment(
        text_config("optimizer.build.fused=false", "host.dropout=0.1"), 1
    )  # meta has no fused kernel
    data = env.host_pool.task(0).data
    data.splits = {name: tokens.to("meta") for name, tokens in data.splits.items()}
    data.device = torch.device("meta")
    run = HostRun(
        None, build=lambda: env.host_pool.build(0), optimizer=env.factory.optimizer, data=data, options=env._options
    )
    run.graft("segment1", "attention", Blend.GATED)
    run.graft("segment2", "mlp_small", Blend.ADD)
    settings = {"segment1": SeedSetting(Mode.BLENDED, 0.5), "segment2": SeedSetting(Mode.ISOLATED, 1.0)}
    packed = run.train_and_measure(StepPlan(settings, settings, ("segment1",), 2, (0.0, 0.1)))
    assert packed.device.type == "meta"


def test_half_precision_measures_similar_gradient_health_and_loss() -> None:
    measured = {}
    for precision in ("32", "bf16", "fp16"):
        env = environment(f"environment.precision={precision}", envs=1)
        env.reset([1])
        measured[precision] = env.step(act(env.space, GERMINATE)).record.now
    for precision in ("bf16", "fp16"):
        torch.testing.assert_close(measured[precision].health, measured["32"].health, atol=0.15, rtol=0)
        assert measured[precision].loss.item() == pytest.approx(measured["32"].loss.item(), rel=0.1)


def run_script(env: Environment, script: dict[int, dict[str, str]], steps: int = 10) -> list[StepRecord]:
    env.reset([3] * env.envs)
    return [env.step(act(env.space, *[script.get(t, {"op": "WAIT"})] * env.envs)).record for t in range(steps)]


GERMINATE = {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"}


def test_contribution_is_measured_only_where_a_live_seed_is_blended() -> None:
    records = run_script(environment(envs=1), {0: GERMINATE, 6: {"op": "FOSSILIZE", "slot": "block2"}})
    for record in records:
        during = record.during
        measured = ~record.now.contribution.isnan()
        expected = during.live & (during.alpha > 0)
        assert torch.equal(measured, expected if record.step < 9 else torch.zeros_like(expected))
    assert records[3].now.contribution[0, 1].isfinite()


@pytest.mark.parametrize("share", [0.25, 0.63, 1.0])  # of 100 images, in batches of 50
def test_contribution_is_the_score_with_the_seed_minus_the_score_without(share: float) -> None:
    env = environment(f"environment.attribution_share={share}", envs=1)
    run_script(env, {0: GERMINATE}, steps=4)
    on = {"block2": SeedSetting(Mode.BLENDED, 1.0)}
    step = env.step(act(env.space, {"op": "WAIT"}))
    model, (x, y) = env.model(0).eval(), next(env.host_pool.task(0).data.batches("validation", round(100 * share)))
    with torch.no_grad():
        with_seed, without = ((model(x, each).argmax(1) == y).float().mean() for each in (on, {}))
    assert step.record.during.alpha[0, 1] == 1
    assert step.record.now.contribution[0, 1].item() == pytest.approx(100 * (with_seed - without).item(), abs=1e-4)
    assert y.bincount().max() - y.bincount().min() <= 1, "classes are balanced in every share"


def test_a_host_that_cannot_have_changed_is_not_measured_again() -> None:
    env = environment(envs=1)
    env.reset([3], [EpisodeStart(fossils={"block1": ("conv_light", "ADD")}, batches=5)])  # a batch in every other step
    evaluate, measured = env.host_run(0)._evaluate, []
    env.host_run(0)._evaluate = lambda *arguments: measured.append(env.view.step) or evaluate(*arguments)  # type: ignore[func-returns-value,method-assign]
    flops, losses = [env.flops_spent()["validation"].item()], []
    for _ in range(env.steps):
        losses.append(env.step(act(env.space, {"op": "WAIT"})).record.now.loss.item())
        flops.append(env.flops_spent()["validation"].item())
    trained = [step for step in range(10) if EpisodeStart(batches=5).batches_in_step(step, 10, 0)]
    assert measured == [0, *trained]
    assert [step for step in range(10) if flops[step + 1] > flops[step]] == measured
    assert all((losses[step] == losses[step - 1]) == (step not in measured) for step in range(1, 10))


def test_contribution_is_measured_every_few_steps_or_never() -> None:
    for every, expected in ((0, set()), (2, {2, 4})):
        records = run_script(environment(f"environment.attribution_every={every}", envs=1), {0: GERMINATE}, steps=6)
        assert {r.step for r in records if r.now.contribution[0, 1].isfinite()} == expected


def test_only_committed_seeds_count_in_the_last_step() -> None:
    committing = {0: GERMINATE, 6: {"op": "FOSSILIZE", "slot": "block2"}}
    for script, is_fossil in ((committing, True), ({0: GERMINATE}, False)):
        env = environment(envs=1)
        records = run_script(env, script)
        last = records[-1]
        parameters = last.seed_parameters[0, 1]
        assert parameters == 2336
        assert last.earlier.parameters[0] == last.host_parameters[0] + parameters
        assert last.now.parameters[0] == last.host_parameters[0] + (parameters if is_fossil else 0)
        committed = {"block2": SeedSetting(Mode.BLENDED, 1.0)} if is_fossil else {}
        accuracy = env.host_run(0).evaluate(committed, "validation")[1]
        assert last.now.accuracy[0] == accuracy
        assert env.test()["accuracy"][0] == env.host_run(0).evaluate(committed, "test")[1]
        assert last.terminated.all()
        assert not last.truncated.any()


def test_the_time_limit_can_truncate() -> None:
    records = run_script(environment("environment.time_limit=truncate", envs=1), {})
    assert [bool(record.truncated) for record in records] == [False] * 9 + [True]
    assert not any(record.terminated for record in records)


def test_flops_grow_with_seeds_and_with_probes() -> None:
    plain = run_script(environment(envs=1), {})
    grown = run_script(environment(envs=1), {0: GERMINATE})
    unprobed = run_script(environment("environment.attribution_every=0", envs=1), {0: GERMINATE})
    flops = [torch.stack([r.now.flops[0] for r in records]).diff() for records in (plain, grown, unprobed)]
    assert (flops[0] == flops[0][0]).all()
    assert (flops[1][:-1] > flops[0][:-1]).all()
    assert grown[0].now.flops == unprobed[0].now.flops > plain[0].now.flops  # an isolated seed is not probed
    assert (flops[2][:-1] < flops[1][:-1]).all()


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_a_probe_is_charged_for_its_batches(share: float) -> None:
    env = environment(f"environment.attribution_share={share}", envs=1)
    run_script(env, {0: GERMINATE}, steps=4)
    settings = {"block2": SeedSetting(Mode.BLENDED, 1.0)}
    plan, run = StepPlan(settings, settings, ("block2",), 2, (0.4, 0.5)), env.host_run(0)
    before = env._current.accounting.total_flops
    env._current.accounting.charge_step(0, plan, env._slots)
    with FlopCounterMode(display=False) as counter:
        run.train_and_measure(plan)
    assert (env._current.accounting.total_flops - before).item() == pytest.approx(counter.get_total_flops(), rel=0.12)


def test_a_step_before_reset_or_after_the_end_is_refused() -> None:
    env = environment(envs=1)
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(act(env.space, {"op": "WAIT"}))
    run_script(env, {})
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(act(env.space, {"op": "WAIT"}))
    with pytest.raises(ValueError, match=r"episode_seeds: 3 were given, must be .* environment\.envs=1"):
        env.reset([1, 2, 3])


def record_episodes(env: Environment, controller: RandomController | ReplayController) -> list[EpisodeRecord]:
    """The records of whole episodes, one for each environment."""
    episode_seeds = list(range(1, env.envs + 1))
    log = EpisodeLog(env.space, env.rules, episode_seeds)
    observation, memory = env.reset(episode_seeds), controller.begin(episode_seeds)
    for _ in range(env.steps):
        action, memory = controller.act(observation, memory)
        step = env.step(action)
        log.add(action, step)
        observation = step.observation
    known = {"arm": "test", "score": None, "parameters": 1.0, "flops": 1.0}
    return [make_record(env, log, index, **known) for index in range(env.envs)]


def write_records(path: Path, *records: EpisodeRecord) -> None:
    writer = LineWriter(path)
    writer.write(*[record.to_dict() for record in records])
    writer.close()


def test_episode_records_survive_writing_and_reading(tmp_path: Path) -> None:
    env, path = environment(), tmp_path / "episodes.jsonl"
    records = record_episodes(env, RandomController(env.space))
    assert [EpisodeRecord.from_dict(record.to_dict()) for record in records] == records
    write_records(path, *records)
    assert read_episodes(path) == (records, [])
    with path.open("a") as file:
        file.write('{"cut off')
    complete, complaints = read_episodes(path)
    assert complete == records
    assert any("line 3 was cut off" in complaint for complaint in complaints)
    write_records(path, records[0])  # removes the incomplete line
    assert read_episodes(path) == ([*records, records[0]], [])
    LineWriter(path, fresh=True).close()
    assert read_episodes(path) == ([], [])


def test_an_episode_record_describes_its_steps() -> None:
    env = environment(envs=1)
    (record,) = record_episodes(env, RandomController(env.space))
    assert record.data == "synthetic_images"
    assert len(record.steps) == 10
    assert record.steps[0].contribution == [None] * 3
    assert {stage for step in record.steps for stage in step.stage} <= set(Stage.__members__)


def test_a_seed_that_is_pruned_while_training_is_recorded_and_reported_with_its_blueprint() -> None:
    env = environment("environment.steps=20", "environment.batches=1", envs=1)  # 2 steps in TRAINING
    prune, other = {"op": "PRUNE", "slot": "block2"}, {**GERMINATE, "blueprint": "norm"}
    actions = [GERMINATE, prune, *[{"op": "WAIT"}] * 3, other]
    (record,) = record_episodes(env, ReplayController(env.space, actions))
    germinated, pruned = record.steps[:2]
    assert germinated.entered[1] == ["GERMINATED", "TRAINING"]
    assert pruned.action == prune
    assert "PRUNED" in pruned.entered[1]
    assert pruned.blueprint == [None, "conv_light", None]
    assert [step.blueprint[1] for step in record.steps[2:5]] == [None] * 3
    assert record.pruned == 1
    assert record.germinations == [Germination(0, "block2", "conv_light"), Germination(5, "block2", "norm")]
    (task,), _ = group_by_task([record])
    tables = [block for block in growth_tables(task) if isinstance(block, ReportTable)]
    by_blueprint = next(table for table in tables if "pruned" in table.header)
    rows = [dict(zip(by_blueprint.header, row, strict=True)) for row in by_blueprint.rows]
    assert {row["blueprint"]: (row["germinated"], row["pruned"]) for row in rows} == {
        "conv_light": ("1.00", "1.00"),
        "norm": ("1.00", "0.00"),
    }
