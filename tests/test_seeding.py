import torch

from esper.seeding import derive, generator, seeded


def test_distinct_purposes_seeds_and_indices_give_distinct_streams() -> None:
    triples = [(purpose, seed, index) for purpose in ("data", "weights") for seed in range(20) for index in range(20)]
    derived = {derive(*triple) for triple in triples}
    assert len(derived) == len(triples)
    assert all(0 <= value < 2**63 for value in derived)
    assert derive("data", 1, 11) != derive("data", 11, 1)


def test_a_derived_seed_is_the_same_everywhere() -> None:
    assert derive("data", 42, 3) == 5427519391226969908


def test_a_generator_follows_from_its_purpose_alone() -> None:
    torch.manual_seed(5)
    one = torch.rand(3, generator=generator("data", 7))
    torch.rand(9)
    assert torch.equal(one, torch.rand(3, generator=generator("data", 7)))
    assert not torch.equal(one, torch.rand(3, generator=generator("augmentation", 7)))


def test_seeded_building_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    with seeded(3):
        one = torch.nn.Linear(4, 4)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(2)
    with seeded(3):
        assert torch.equal(one.weight, torch.nn.Linear(4, 4).weight)
