"""The tiers against one slow lane, over random schedules of prompts, steps, drafts, crops, texts, copies and turns."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, currently_in_test_context, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict import routing
from qevict.arena import EMPTY
from qevict.budget import TierPlan, plan_tiers
from qevict.config import Budget, QEvictConfig
from qevict.geometry import KVGeometry
from qevict.kernels import attend
from qevict.migration import Moves
from qevict.ranking import DecayedAttention
from qevict.rope import Rope
from qevict.tiers import TierStore
from reference.naive_cache import CODES, EVICTED, FULL, NaiveLane

NAMES = {routing.FULL: FULL, routing.QUANTIZED: CODES, routing.EVICTED: EVICTED}
ROWS = 2
Op = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """Settings of one schedule. `planned` is S, or None where it is not announced."""

    config: QEvictConfig
    kv_heads: int
    group: int
    head_dim: int
    planned: int | None
    seed: int

    @property
    def lane_heads(self) -> int:
        return 1 if self.config.granularity == "kv_head" else self.kv_heads

    @property
    def geometry(self) -> KVGeometry:
        assert self.config.store_dtype is not None
        return KVGeometry(1, self.kv_heads, self.kv_heads * self.group, self.head_dim, self.config.store_dtype.itemsize)

    def plan(self, tokens: int | None) -> TierPlan:
        return plan_tiers(self.config, self.geometry, tokens)

    def with_history(self, windows: float, mode: str) -> Case:
        """The case with a budget that leaves the bytes of so many full windows beside the protected tokens."""
        config, token = self.config, self.geometry.token_bytes
        growth = config.window_size - 1 + config.interval if config.reserve_growth else 0
        protected = config.sink_tokens + int(config.recent_tokens) + growth
        scores = 8 * self.kv_heads * (protected // config.window_size + 3)  # and the lane's 8 bytes
        size = int(windows * config.window_size * token) + protected * token + scores
        if mode == "bytes":
            return replace(self, config=config.replace(budget=Budget(bytes=size)), planned=None)
        if mode == "announced bytes":
            return replace(self, config=config.replace(budget=Budget(bytes=size)), planned=protected + 20)
        return replace(self, config=config.replace(budget=0.4), planned=int(size / (0.4 * token)) + 2)


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> Case:
    allocation = fixed.get("allocation") or draw(st.sampled_from(["coverage", "split"]))
    options: dict[str, Any] = {
        "window_size": draw(st.sampled_from([1, 4, 8, 16])),
        "routing_interval": draw(st.sampled_from([None, None, 1, 3, 8, 11])),
        "sink_tokens": draw(st.integers(0, 5)),
        "recent_tokens": draw(st.integers(1, 9)),
        "quantized_fraction": draw(st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0])),
        "allocation": allocation,
        "codec": "minmax",
        "bits": draw(st.sampled_from([2, 3, 4])),
        "ranking": draw(st.sampled_from(["cumulative", "decayed:0.5", "decayed", "p-norm", "key-norm"])),
        "granularity": draw(st.sampled_from(["layer", "kv_head"])),
        "prompt_queries": draw(st.sampled_from(["all", 1, 4, 100])),
        "score_steps": draw(st.sampled_from(["every", "event"])),
        "promotion": draw(st.sampled_from([True, True, False])),
        "dormant": draw(st.sampled_from(["slots", "extra"])) if allocation == "split" else "slots",
        "reserve_growth": draw(st.sampled_from([True, True, False])),
        "store_dtype": draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
    }
    config = QEvictConfig(**(options | fixed))
    kv_heads, group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([8, 16]))
    case = Case(config, kv_heads, group, head_dim, None, draw(st.integers(0, 2**31)))
    return case.with_history(draw(st.floats(0, 8)), draw(st.sampled_from(["bytes", "announced bytes", "fraction"])))


PROMPTS = st.sampled_from([-5, -4, -3, -2, -1]) | st.integers(1, 60)
"""Tokens of a prompt; a negative number is one of `edge_prompt`'s."""


def edge_prompt(case: Case, number: int) -> int:
    """A prompt of 1, Omega - 1, Omega, Omega + 1 tokens, or as many as the protected storage holds."""
    window = case.config.window_size
    return [1, max(1, window - 1), window, window + 1, case.plan(case.planned).protected_slots][-number - 1]


OPS = st.lists(
    st.tuples(st.just("steps"), st.integers(1, 14))
    | st.tuples(st.just("draft"), st.integers(1, 20), st.integers(0, 20))
    | st.tuples(st.just("text"), st.integers(2, 30))
    | st.tuples(st.just("take"), st.lists(st.integers(0, 5), min_size=1, max_size=3))
    | st.tuples(st.just("extend"), st.integers(1, 40)),
    min_size=1,
    max_size=6,
)


class Run:
    """A store, and a slow lane for each of its lanes, fed with the same tokens."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.random = torch.Generator().manual_seed(case.seed)
        lanes_per_row = case.kv_heads // case.lane_heads
        position = torch.arange(ROWS).repeat_interleave(lanes_per_row) * 7
        rope = Rope(torch.rand(case.head_dim // 2 - 1, generator=self.random))
        plan, dtype = case.plan(case.planned), case.config.store_dtype
        assert dtype is not None
        self.store = TierStore(plan, case.config, len(position), case.lane_heads, case.head_dim, rope, position, dtype)
        self.lanes = [NaiveLane(plan, case.config, rope, at, dtype) for at in position.tolist()]
        self.codes: list[dict[int, Tensor]] = [{} for _ in self.lanes]
        self.outputs: list[Tensor] = []

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of new tokens, different in every lane."""
        shape = (len(self.lanes), self.case.lane_heads, count, self.case.head_dim)
        queries = torch.randn(*shape[:2], self.case.group, *shape[2:], generator=self.random)
        keys, values = torch.randn(shape, generator=self.random), torch.randn(shape, generator=self.random)
        return queries, keys, values

    # -- operations ----------------------------------------------------------------------------------------------------

    def prompt(self, count: int) -> None:
        queries, keys, values = self.tokens(self.fitting(count))
        self.store.begin(queries, keys, values, 0.5)
        self.store.settle()
        for i, lane in enumerate(self.lanes):
            lane.forward(queries[i], keys[i], values[i], 0.5)
            lane.settle(0)
        self.check()

    def forward(self, count: int, text: bool = False) -> None:
        """What a layer does with a later forward."""
        count = self.fitting(count)
        queries, keys, values = self.tokens(count)
        self.store.settle(coming=count)
        counted = self.case.config.prompt_queries
        last = None if not text else count if counted == "all" else counted
        assert last is None or isinstance(last, int)
        view = self.store.view(keys, values)
        output, mass = attend(queries, view, 0.5, last)
        columns = self.columns(mass.shape[2])
        self.store.append(keys, values, mass)
        if text:
            self.store.settle()
        self.outputs.append(output)
        for i, lane in enumerate(self.lanes):
            expected, masses = lane.forward(queries[i], keys[i], values[i], 0.5, text)
            close(output[i], expected)
            if last is not None:
                masses = [total(masses[-last:])]
            for step, naive in zip(mass[i], masses, strict=True):
                close_scores(dict(zip(columns[i], step.tolist(), strict=True)), naive)
        self.check()

    def draft(self, count: int, cropped: int) -> None:
        self.forward(count)
        cropped = min(cropped, self.lanes[0].pending)
        self.store.crop(cropped) if cropped else None
        for lane in self.lanes:
            lane.crop(cropped)
        self.check()

    def take(self, indices: list[int]) -> None:
        indices = [i % len(self.lanes) for i in indices]
        self.store = self.store.take(torch.tensor(indices))
        self.lanes = [deepcopy(self.lanes[i]) for i in indices]
        self.codes = [dict(self.codes[i]) for i in indices]
        self.check()

    def extend(self, tokens: int) -> None:
        planned, total_tokens = self.store.plan.tokens, self.store.length + tokens
        if planned is None or total_tokens <= planned:
            return
        plan = self.case.plan(total_tokens)
        self.store.replan(plan)
        for lane in self.lanes:
            lane.plan = self.store.plan
        self.check()

    def do(self, op: Op) -> None:
        match op:
            case "steps", count:
                for _ in range(count):
                    self.forward(1)
            case "draft", count, cropped:
                self.draft(count, cropped)
            case "text", count:
                self.forward(count, text=True)
            case "take", indices:
                self.take(indices)
            case "extend", tokens:
                self.extend(tokens)

    def fitting(self, count: int) -> int:
        """`count`, after announcing more where all of a short sequence is protected; as much as fits in a prompt."""
        plan = self.store.plan
        if plan.tokens is not None and plan.tokens <= plan.protected_slots:
            if not self.store.length:
                return min(count, plan.tokens)
            if self.store.length + count > plan.protected_slots:
                self.extend(count + plan.protected_slots)
        return count

    # -- comparison ----------------------------------------------------------------------------------------------------

    def columns(self, count: int) -> list[list[object]]:
        """Which window each mass column belongs to; a column without one has a name of its own."""
        arena = self.store.arena
        numbers = torch.cat(
            [
                arena.full.window[:, : arena.full_used],
                arena.codes.window[:, self.store.plan.max_codes - arena.code_used :],
            ],
            dim=1,
        )
        local = [self.store.aged + i for i in range(count - numbers.shape[1])]
        return [[w if w >= 0 else f"none {i}" for i, w in enumerate(lane)] + local for lane in numbers.tolist()]

    def check(self) -> None:
        """Everything that must hold after every operation."""
        store, plan, config = self.store, self.store.plan, self.case.config
        # Scores closer than rounding may be ordered either way.
        rounded = config.ranking == "key-norm" and config.store_dtype != torch.float32
        if currently_in_test_context():
            assume(all(lane.closest > (1e-2 if rounded else 3e-6) for lane in self.lanes))
        tiers = store.assignment()
        for i, lane in enumerate(self.lanes):
            assert store.length == len(lane.tokens)
            assert store.events == lane.events
            assert [NAMES[t] for t in tiers[i].tolist()] == [lane.tier[w] for w in range(len(lane.tier))]
            check_slots(store, lane, i)
            check_codes(store, lane, i, self.codes[i])
            check_scores(store, lane, i)
        report = store.memory()
        layout = store.plan.codec.layout(store.shape)
        assert report.reserved == sum(t.nbytes for t in storages(store))
        assert report.reserved == len(self.lanes) * plan.reserved_bytes
        assert report.budget == len(self.lanes) * plan.budget_bytes
        if config.reserve_growth and config.dormant == "slots":
            assert report.reserved <= report.budget
        if store.pending is None or store.pending.keys is None:
            assert report.used == sum(lane.used_bytes(layout.nbytes) for lane in self.lanes)
        assert report.used <= report.reserved
        assert report.codes + report.parameters == sum(len(lane.codes) for lane in self.lanes) * layout.nbytes
        if config.quantized_fraction == 0:
            assert not any(lane.codes for lane in self.lanes)
            assert bool((store.arena.codes.window == EMPTY).all())


def check_slots(store: TierStore, lane: NaiveLane, i: int) -> None:
    """The windows of both regions without gaps, and the bytes of every full slot."""
    full, codes = store.arena.full.window[i].tolist(), store.arena.code_windows()[i].tolist()
    held = [w for w, tier in lane.tier.items() if tier == FULL]
    assert sorted(full[: len(held)]) == sorted(held)
    assert set(full[len(held) :]) <= {EMPTY}
    first = len(codes) - len(lane.codes)
    assert set(codes[:first]) <= {EMPTY}
    assert sorted(codes[first:]) == sorted(lane.codes)
    marked = store.arena.codes.window[i].tolist()
    assert {-2 - mark for mark in marked if mark < EMPTY} == {w for w in lane.codes if lane.tier[w] == FULL}
    slots = store.arena.full_slots()[i]
    for slot, window in enumerate(full[: len(held)]):
        read = [entry for token in lane.members(window) if (entry := lane.read(token))]
        expected = [torch.stack([entry[part] for entry in read], dim=1).to(lane.dtype) for part in (1, 2)]
        assert torch.equal(slots[slot], torch.stack(expected))


def check_codes(store: TierStore, lane: NaiveLane, i: int, first: dict[int, Tensor]) -> None:
    """Codes are those of the first demotion, to the bit; `first` remembers what they were when they were first seen."""
    slots = store.arena.code_slots()[i]
    for slot, window in enumerate(store.arena.code_windows()[i].tolist()):
        if window == EMPTY:
            continue
        packed = slots[slot]
        assert torch.equal(packed, first.setdefault(window, packed.clone()))
        assert torch.equal(packed, lane.codes[window])


def check_scores(store: TierStore, lane: NaiveLane, i: int) -> None:
    """Ranking states and masses of all live windows."""
    live: dict[object, tuple[float, float]] = {}
    for table in (store.arena.full, store.arena.codes):
        rows = zip(table.window[i].tolist(), table.state[i].tolist(), table.mass[i].tolist(), strict=True)
        live |= {w: (s, m) for w, s, m in rows if w >= 0}
    rows = zip(store.recent_state[i].tolist(), store.recent_mass[i].tolist(), strict=True)
    live |= {store.aged + j: row for j, row in enumerate(rows)}
    for part, naive in ((0, lane.state), (1, lane.mass)):
        scores = {w: naive.get(w, 0.0) for w in live if isinstance(w, int) and lane.tier.get(w) != EVICTED}
        if lane.config.ranking != "key-norm" or part:
            close_scores({w: pair[part] for w, pair in live.items()}, scores)


def storages(store: TierStore) -> list[Tensor]:
    """Every tensor that the store owns; the pending forward's are not among them."""
    owners: list[Any] = [store, store.arena, store.arena.full, store.arena.codes]
    found = {
        value.untyped_storage().data_ptr() if value.nbytes else id(value): value
        for owner in owners
        for value in vars(owner).values()
        if isinstance(value, torch.Tensor)
    }
    return list(found.values())


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=1e-4)


def close_scores(actual: dict[Any, float], expected: dict[int, float]) -> None:
    """Both give every window the same number; a window that only one knows counts as zero."""
    for window in actual.keys() | expected.keys():
        a, b = actual.get(window, 0.0), expected.get(window, 0.0)
        assert abs(a - b) <= 1e-4 + 1e-4 * abs(b), f"window {window}: {a} instead of {b}"


def total(masses: list[dict[int, float]]) -> dict[int, float]:
    added: dict[int, float] = {}
    for mass in masses:
        for window, share in mass.items():
            added[window] = added.get(window, 0.0) + share
    return added


def play(case: Case, prompt: int, ops: list[Op]) -> Run:
    """A run over a whole schedule, compared with the slow lanes after every operation."""
    run = Run(case)
    run.prompt(prompt if prompt > 0 else edge_prompt(case, prompt))
    for op in ops:
        run.do(op)
    return run


@settings(max_examples=40)
@given(cases(), PROMPTS, OPS)
def test_random_schedules_match_the_slow_lane(case: Case, prompt: int, ops: list[Op]) -> None:
    play(case, prompt, ops)


def example(history: float = 6.0, mode: str = "bytes", kv_heads: int = 2, **changes: Any) -> Case:
    """Windows that move a lot: few slots, scores that forget."""
    options: dict[str, Any] = {
        "window_size": 4,
        "routing_interval": 4,
        "sink_tokens": 2,
        "recent_tokens": 3,
        "quantized_fraction": 0.5,
        "allocation": "split",
        "codec": "minmax",
        "ranking": DecayedAttention(0.3),
        "store_dtype": torch.bfloat16,
    }
    return Case(QEvictConfig(**(options | changes)), kv_heads, 2, 16, None, 7).with_history(history, mode)


LONG: list[Op] = [("steps", 25), ("draft", 9, 5), ("text", 20), ("draft", 14, 14), ("steps", 12), ("draft", 5, 0)]


def moved(run: Run) -> Moves:
    """What moved in all lanes together."""
    return sum(run.store.moves, start=Moves())


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
@pytest.mark.parametrize("dormant", ["slots", "extra"])
def test_windows_move_both_ways_many_times(granularity: str, dormant: str) -> None:
    """The random schedules would prove little if nothing moved; here much does, and codes stay what they were."""
    run = play(example(dormant=dormant, granularity=granularity), 40, LONG)
    moves = moved(run)
    assert moves.promoted > 5
    assert moves.reactivated > 5
    assert moves.quantized > 5
    assert moves.evicted > 5


def test_windows_are_promoted_under_coverage_too() -> None:
    """A fresh window comes before a promotion, so bytes have to be left over for one: where few windows are there."""
    run = play(example(6, quantized_fraction=1.0, allocation="coverage"), 12, [("steps", 40), ("text", 17), *LONG])
    assert moved(run).quantized > 5


def test_nothing_returns_without_promotion() -> None:
    moves = moved(play(example(promotion=False), 40, LONG))
    assert (moves.promoted, moves.reactivated) == (0, 0)
    assert moves.quantized > 5


@pytest.mark.parametrize("allocation", ["split", "coverage"])
def test_two_tiers_have_no_codes(allocation: str) -> None:
    run = play(example(quantized_fraction=0.0, allocation=allocation), 40, LONG)
    assert run.store.counts()[1] == 0
    assert run.store.memory().codes == run.store.memory().parameters == 0
    assert moved(run).evicted > 5


def test_nothing_is_quantized_or_evicted_while_all_fits() -> None:
    run = play(example(60, allocation="coverage", quantized_fraction=1.0), 40, LONG)
    full, quantized, evicted = run.store.counts()
    assert full > 0
    assert (quantized, evicted) == (0, 0)
    assert moved(run) == (0, 0, 0, 0)


def test_generation_goes_on_beyond_the_announced_length() -> None:
    run = play(example(6, "fraction"), 30, [("steps", 16), ("draft", 20, 3)] * 2)
    planned = run.store.plan.tokens
    assert planned is not None
    assert run.store.length > planned


def test_a_sequence_announced_to_be_short_does_not_get_long_unannounced() -> None:
    """All of it is protected and nothing else is stored, so there is no room."""
    run = Run(replace(example(), planned=9))
    queries, keys, values = run.tokens(9)
    run.store.begin(queries, keys, values, 0.5)
    run.store.settle()
    with pytest.raises(RuntimeError, match=r"passes the 9 tokens that its budget was planned for; announce more"):
        run.store.settle(coming=1)
    run.store.replan(run.case.plan(60))
    run.store.settle(coming=1)


def test_a_draft_that_is_rejected_whole_might_as_well_not_have_been() -> None:
    """However long it was: tiers, scores, event times and outputs are the same to the bit."""
    plain, drafting = Run(example()), Run(example())
    for run in (plain, drafting):
        run.prompt(30)
    for step in range(40):
        drafts = drafting.tokens(2 + step % 29)
        drafting.store.settle(coming=drafts[1].shape[2])
        mass = attend(drafts[0], drafting.store.view(*drafts[1:]), 0.5).mass
        drafting.store.append(*drafts[1:], mass)
        drafting.store.crop(drafts[1].shape[2])
        token = drafting.tokens(1)
        for run in (plain, drafting):
            run.store.settle(coming=1)
            output, mass = attend(token[0], run.store.view(*token[1:]), 0.5)
            run.store.append(*token[1:], mass)
            run.outputs.append(output)
    assert moved(plain).quantized > 5
    assert moved(drafting) == moved(plain)
    assert drafting.store.events == plain.store.events
    assert torch.equal(drafting.store.arena.data, plain.store.arena.data)
    for one, other in zip(plain.outputs, drafting.outputs, strict=True):
        assert torch.equal(one, other)


def test_what_rejected_tokens_held_does_not_matter() -> None:
    """Drafts with and without room, all but one token of each rejected: other drafts, the same future to the bit."""
    runs = [Run(example()), Run(example())]
    for draft, run in enumerate(runs):
        run.prompt(30)
        for count in [2, 5, 14, 30] * 5:
            queries, keys, values = run.tokens(count)
            for tensor in (queries, keys, values):
                tensor[..., 1:, :] += draft
            run.store.settle(coming=count)
            output, mass = attend(queries, run.store.view(keys, values), 0.5)
            run.store.append(keys, values, mass)
            run.store.crop(count - 1)
            run.outputs.append(output[:, :, :, :1])
    assert runs[0].store.length == 50
    assert moved(runs[0]).quantized > 0
    for one, other in zip(runs[0].outputs, runs[1].outputs, strict=True):
        assert torch.equal(one, other)


def test_more_than_the_last_forward_cannot_be_cropped() -> None:
    run = play(example(), 10, [("draft", 3, 1)])
    with pytest.raises(ValueError, match=r"cannot remove 3 tokens: only the last forward's 2 can be undone"):
        run.store.crop(3)
    run.store.crop(2)
    with pytest.raises(ValueError, match="only the last forward's 0 can be undone"):
        run.store.crop(1)


@pytest.mark.parametrize("cropped", [0, 6, 29])
def test_a_prompt_stays_pending_until_it_is_settled(cropped: int) -> None:
    """With past recording a prompt, too, can be cropped before it counts."""
    case = example()
    run = Run(case)
    queries, keys, values = run.tokens(30)
    run.store.begin(queries, keys, values, 0.5)
    assert run.store.events == 0
    assert run.store.memory().workspace >= 2 * keys.nbytes
    if cropped:
        run.store.crop(cropped)
    for i, lane in enumerate(run.lanes):
        lane.forward(queries[i], keys[i], values[i], 0.5)
        lane.crop(cropped)
    run.forward(1)
    run.forward(1)
    assert run.store.length == 32 - cropped


@settings(max_examples=8)
@given(cases(granularity="layer"), PROMPTS, OPS, st.permutations(range(ROWS)))
def test_lanes_are_independent(case: Case, prompt: int, ops: list[Op], order: list[int]) -> None:
    """A lane alone gets what it gets in a batch, and a permuted batch is permuted through and through."""
    ops = [op for op in ops if op[0] != "take"]
    batch, others = Run(case), [Alone(case, [lane]) for lane in range(ROWS)] + [Alone(case, list(order))]
    for run in (batch, *others):
        run.prompt(prompt if prompt > 0 else edge_prompt(case, prompt))
        for op in ops:
            run.do(op)
    for run in others:
        for whole, part in zip(batch.outputs, run.outputs, strict=True):
            torch.testing.assert_close(whole[run.chosen], part, rtol=1e-5, atol=1e-5)
        assert torch.equal(batch.store.assignment()[run.chosen], run.store.assignment())
        for table, own in (
            (batch.store.arena.full, run.store.arena.full),
            (batch.store.arena.codes, run.store.arena.codes),
        ):
            assert torch.equal(table.window[run.chosen], own.window)
            torch.testing.assert_close(table.state[run.chosen], own.state, rtol=1e-5, atol=1e-5)


class Alone(Run):
    """A run of some lanes of a case, with the tokens that they have in the whole batch."""

    def __init__(self, case: Case, chosen: list[int]) -> None:
        super().__init__(case)
        self.chosen = chosen
        self.take(chosen)

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = (ROWS, self.case.lane_heads, count, self.case.head_dim)
        queries = torch.randn(*shape[:2], self.case.group, *shape[2:], generator=self.random)
        keys, values = torch.randn(shape, generator=self.random), torch.randn(shape, generator=self.random)
        return queries[self.chosen], keys[self.chosen], values[self.chosen]


def test_copies_share_nothing() -> None:
    run = play(example(), 30, [("steps", 10)])
    one, two = deepcopy(run.store), run.store.take(torch.arange(len(run.lanes)))
    for copied in (one, two):
        assert {t.untyped_storage().data_ptr() for t in storages(run.store) if t.nbytes}.isdisjoint(
            t.untyped_storage().data_ptr() for t in storages(copied)
        )
    before = [t.clone() for t in storages(one)]
    for op in LONG:
        run.do(op)
    for was, now in zip(before, storages(one), strict=True):
        assert torch.equal(was, now)


@pytest.mark.parametrize("allocation", ["split", "coverage"])
def test_equal_scores_keep_the_later_windows(allocation: str) -> None:
    config = {"ranking": lambda state, mass: torch.zeros_like(state), "allocation": allocation}
    run = Run(example(4, **config))
    queries, keys, values = run.tokens(80)
    run.store.begin(queries, keys, values, 0.5)
    run.store.settle()
    assert run.store.counts()[0] > 0
    assert run.store.counts()[2] > 0
    for lane in run.store.assignment():
        assert lane.tolist() == sorted(lane.tolist())  # evicted, quantized, full


def test_a_ranking_that_returns_the_masses_ranks_by_them() -> None:
    """The most recent interval alone decides; the states must survive the clearing of the masses."""
    run = Run(example(4, ranking=lambda state, mass: mass))
    queries, keys, values = run.tokens(60)
    run.store.begin(queries, keys, values, 0.5)
    run.store.settle()
    for _ in range(9):
        queries, keys, values = run.tokens(1)
        run.store.settle(coming=1)
        _, mass = attend(queries, run.store.view(keys, values), 0.5)
        run.store.append(keys, values, mass)
    held = run.store.arena.full.window >= 0
    assert bool((run.store.arena.full.state[held] > 0).all())


@pytest.mark.parametrize("total", [51, 54, 70, 90])
def test_another_turn_with_a_recent_region_that_is_a_fraction_of_the_budget(total: int) -> None:
    """The region may grow by more than the budget does: at 51 tokens it leaves history fewer slots than at 50."""
    config = QEvictConfig(
        budget=0.5, window_size=1, sink_tokens=0, recent_tokens=0.75, quantized_fraction=0.0, store_dtype=torch.bfloat16
    )
    run = Run(Case(config, 1, 1, 16, 50, 3))
    run.prompt(50)
    before = run.store.plan
    run.extend(total - run.store.length)
    assert run.store.plan.max_full >= before.max_full
    run.do(("steps", 12))
