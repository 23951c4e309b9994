"""The risk: a kernel that is fast and wrong.

Each is held against its torch reference, on a GPU where there is one, else under Triton's interpreter on tiny shapes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="triton has no wheel here")

from engine.config import PAGE  # noqa: E402
from engine.kv.dtype import KV, Form  # noqa: E402
from engine.ops import geometry as g  # noqa: E402
from engine.ops import triton_layers, triton_pages, triton_score, triton_select, triton_slots  # noqa: E402
from engine.ops.attention import PartialAttention  # noqa: E402
from engine.ops.geometry import Turns  # noqa: E402
from engine.ops.norm import rms_norm  # noqa: E402
from engine.ops.rope import RopeConfig, Rotary, rotate  # noqa: E402
from engine.ops.triton_attention import PagedAttention  # noqa: E402
from engine.recall.digest import encode_keys, pack_codes  # noqa: E402
from engine.recall.score import mass, page_lse  # noqa: E402
from engine.recall.select import HYSTERESIS, WORTH, choose  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def rotary(dim: int) -> Rotary:
    return Rotary(RopeConfig(theta=10000.0), dim, DEVICE)


def geometry(**values: int) -> torch.Tensor:
    vector = torch.zeros(g.GEOMETRY, dtype=torch.int32)
    for name, value in values.items():
        vector[getattr(g, name)] = value
    return vector.to(DEVICE)


def ints(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


class Scene:
    """Past and own pages scattered over a pool and a host store, as a step would find them."""

    def __init__(self, dim: int, heads: int, kv_heads: int, tokens: int, first: int, past: int, dtype, cold=()) -> None:
        torch.manual_seed(dim + tokens + past)
        self.own = -(-(first + tokens) // PAGE)
        self.past, self.first, self.tokens, self.heads, self.kv_heads, self.dim = (
            past,
            first,
            tokens,
            heads,
            kv_heads,
            dim,
        )
        pages = past + self.own
        self.rope = rotary(dim)
        self.kv = torch.randn(pages, 2, kv_heads, PAGE, dim, device=DEVICE).to(dtype)
        self.ids = np.random.default_rng(1).permutation(pages + 3)[:pages]
        slots = np.random.default_rng(2).permutation(pages + 2)[:pages]
        self.pool = torch.full((pages + 2, 2, kv_heads, PAGE, dim), float("nan"), device=DEVICE, dtype=dtype)
        self.host = torch.full((pages + 3, 1, 2, kv_heads, PAGE, dim), float("nan"), dtype=dtype)
        if CUDA:
            self.host = self.host.pin_memory()
        self.slot_of = np.full(pages + 3, -1)
        for page in range(pages):
            self.host[self.ids[page], 0] = self.kv[page].cpu()
            if page not in cold:
                self.slot_of[self.ids[page]] = slots[page]
                self.pool[slots[page]] = self.kv[page]
        self.q = torch.randn(tokens, heads, dim, device=DEVICE)
        self.turns = Turns.of(self.rope, pages + 1)

    def reference(self, window: list[int], compact: bool) -> torch.Tensor:
        distance = np.arange(len(window), 0, -1) if compact else self.past - np.asarray(window, dtype=np.int64)
        own = np.arange(self.past, self.past + self.own)
        partial = PartialAttention(self.rope, self.q, self.kv_heads)
        kv = self.kv[torch.tensor([*window, *own])].float()
        where = np.concatenate([distance, self.past - own]).astype(np.int64)
        partial.add(kv, where, len(window) * PAGE + self.first)
        return partial.result()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "tokens", "first", "past"),
    [
        (64, 4, 2, 1, 5, 6),
        (80, 2, 2, 1, 63, 3),
        (96, 6, 2, 3, 0, 2),
        (128, 8, 2, 7, 60, 3),
        (256, 2, 1, 1, 0, 1),
        (64, 3, 3, 1, 9, 0),
    ],
)
@pytest.mark.parametrize("compact", [False, True])
def test_paged_attention_is_the_reference(dim, heads, kv_heads, tokens, first, past, dtype, compact):
    cold = {0, past - 1} if past else set()
    scene = Scene(dim, heads, kv_heads, tokens, first, past, dtype, cold)
    window = [page for page in range(past) if page % 3 != 1]
    attention = PagedAttention(heads, kv_heads, dim, 8, DEVICE, 8)
    counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=DEVICE)
    for pages in (None, window):
        seen = list(range(past)) if pages is None else pages
        state = geometry(PAST=past, FIRST=first, OWN=scene.own, WINDOW=len(seen))
        out = attention(
            scene.q,
            scene.pool,
            scene.host[:, 0],
            ints(scene.slot_of),
            ints(scene.ids),
            None if pages is None else ints([*pages, 0]),
            state,
            scene.turns,
            counters,
            scene.rope.score_scale,
            compact,
            dtype=torch.float32,
        )
        torch.testing.assert_close(out, scene.reference(seen, compact), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    met = sum(page in cold for page in range(past)) + sum(page in cold for page in window)
    assert int(counters[g.STREAMED]) == met


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 300), st.integers(1, 600))
def test_partial_sums_have_room_for_every_number_of_tokens(kv_heads, group, most, units):
    """Eight tokens of groups of five wrote beyond buffers that were large enough for 1 and for 256."""
    attention = PagedAttention(kv_heads * group, kv_heads, 2, most, torch.device("cpu"), units)
    for tokens in range(1, most + 1):
        assert attention._splits(tokens) * tokens * kv_heads * group <= attention._lse.numel()


@pytest.mark.parametrize(
    ("dim", "tokens", "far", "splits"),
    [(64, 2, [0, 1], 2), (80, 2, [0, 1], 2), (128, 2, [1], 4), (64, 9, [0, 1], 2), (80, 9, [1], 4)],
)
def test_page_scores_and_closed_codes_are_the_reference(dim, tokens, far, splits):
    heads, kv_heads, past = 4, 2, 7
    scene = Scene(dim, heads, kv_heads, tokens, 0, past, torch.bfloat16)
    codes = torch.zeros(len(far), past + 10, PAGE, dim // 2, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(len(far), past + 10, PAGE, device=DEVICE)
    groups = ints([[0] * len(far), far])
    ids = torch.tensor(scene.ids[:past], device=DEVICE)
    slots = torch.tensor(scene.slot_of[scene.ids[:past]], device=DEVICE)[None]
    triton_pages.close_pages(scene.pool[None], slots, ids, codes, scales, groups)
    expected, sizes = encode_keys(scene.kv[:past, 0, far].cpu())  # CUDA's division by a constant is not exact
    assert torch.equal(codes[:, ids].transpose(0, 1).cpu(), pack_codes(expected))
    assert torch.equal(scales[:, ids].transpose(0, 1).cpu(), sizes)

    scores = triton_score.PageScores(tokens, heads, kv_heads, past + 4, DEVICE, 4, 4)
    scores.listed.fill_(9)
    state = geometry(PAST=past, FARTHEST=4)
    scores(scene.q, codes, scales, groups[1], ints(scene.ids), state, scene.turns, scene.rope.score_scale)
    distance = np.minimum(np.arange(past, 0, -1), 4)
    expected, sizes = expected.to(DEVICE).float(), sizes.to(DEVICE)
    looking = scene.q.view(tokens, kv_heads, -1, dim)[:, far].reshape(tokens, -1, dim)
    wanted = page_lse(scene.rope, looking, expected, distance, sizes)
    rows, far = tokens * heads // kv_heads, len(far)
    torch.testing.assert_close(scores.lse[:far, :rows, :past], wanted, atol=2e-2, rtol=2e-3)
    parts = [
        part[: far * scores.lse.shape[1] * splits].view(far, -1, splits)[:, :rows] for part in (scores.top, scores.sum)
    ]
    assert scores.splits == splits
    torch.testing.assert_close((parts[1].log() + parts[0]).logsumexp(-1), scores.lse[:far, :rows, :past].logsumexp(-1))
    assert not scores.listed[:far].any()


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_ranks_and_picks_choose_what_the_reference_chooses(seed, compact):
    random = np.random.default_rng(seed)
    kv_heads, tokens, past, capacity = int(random.integers(1, 5)), int(random.integers(1, 4)), 90 + seed, 110
    slots, budget, neighbors = 64, int(random.integers(1, 24)), seed % 3
    scores = triton_score.PageScores(tokens, kv_heads, kv_heads, capacity, DEVICE, 3 * kv_heads, 3 * kv_heads)
    scores.rows, scores.splits = tokens, 3
    scores.lse.fill_(float("nan"))
    lse = torch.tensor(random.normal(size=(kv_heads, tokens, past)) * 3, device=DEVICE, dtype=torch.float32)
    scores.lse[:, :tokens, :past] = lse
    for split in range(3):
        part = lse[..., split::3]
        for out, value in ((scores.top, part.amax(-1)), (scores.sum, (part - part.amax(-1, True)).exp().sum(-1))):
            out[: kv_heads * 8 * 3].view(kv_heads, 8, 3)[:, :tokens, split] = value
    always = np.zeros(past, dtype=bool)
    always[:2] = always[-3:] = True
    excluded = np.zeros(past, dtype=bool)
    excluded[10:13] = True
    eligible = ~always & ~excluded
    lexical = np.where(random.random(past) < 0.1, random.random(past), 0.0)
    quota = budget // 4
    held = np.flatnonzero(eligible & (random.random(past) < 0.3))
    shared = {"neighbors": neighbors, "lexical": lexical, "lexical_quota": quota}
    taken = choose(None, eligible, budget, **shared).pages
    wanted = choose(mass(lse).cpu().numpy(), eligible, budget, held=held, **shared).pages

    role = np.full(capacity, g.HIDDEN)
    role[:past][eligible], role[:past][always] = g.CANDIDATE, g.ALWAYS
    role[taken] = g.TAKEN
    why = np.zeros(capacity)
    why[held] = g.KEY
    role, why = (torch.tensor(x, device=DEVICE).to(torch.uint8) for x in (role, why))
    scores.order.fill_(7)
    pages = capacity + 5
    ids = random.permutation(pages)[:capacity]
    tables = random_tables(random, pages, slots, ids[:past], tick=9)
    before = {name: getattr(tables, name).clone() for name in ("slot_of", "page_in", "last_used")}
    fixed = np.flatnonzero(always | np.isin(np.arange(past), taken))
    window, choice = ints(np.full(capacity, -9)), triton_select.Choice.empty(slots, DEVICE)
    misses = triton_slots.Misses.empty(1, slots, DEVICE).layer(0)
    left, depth = budget - len(taken), min(budget, int(eligible.sum()))
    assert depth <= triton_select.most_ranks(kv_heads, capacity)
    state = geometry(PAST=past, LEFT=left, DEPTH=depth, WINDOW=len(fixed) + left, TICK=9)
    counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=DEVICE)
    bars = ints([-1] * kv_heads)
    triton_select.rank(scores, bars, why, role, choice, state, HYSTERESIS, WORTH)
    enough = bars.clone()  # where most or all of those that count pass
    scores.listed.zero_()
    bars.copy_(
        torch.where(ints(random.integers(0, 2, kv_heads)) == 1, enough, ints(random.integers(0, 1 << 30, kv_heads)))
    )
    triton_select.rank(scores, bars, why, role, choice, state, HYSTERESIS, WORTH)
    triton_select.pick(scores, role, why, choice, state, neighbors)
    triton_slots.bring(ints(fixed), choice, window, ints(ids), tables, misses, state, counters, compact)

    expected = np.sort(np.concatenate([wanted, np.flatnonzero(always)]))
    got = window[: len(expected)].tolist()
    assert (got if compact else sorted(got)) == expected.tolist() and window[len(expected)] == -9
    assert np.flatnonzero(why.cpu().numpy()[:past]).tolist() == wanted.tolist()
    check_claims(before, tables, misses, ids[expected], 9)
    assert int(counters[g.FETCHED]) == int(misses.count)
    assert bool(choice.changed) == (set(np.setdiff1d(held, taken)) != set(np.setdiff1d(wanted, taken)))


def random_tables(random, pages: int, slots: int, mine: np.ndarray, tick: int) -> triton_slots.Tables:
    page_in = np.full(slots, -1)
    filled = random.permutation(slots)[: slots - 3]
    page_in[filled] = random.permutation(pages)[: len(filled)]
    slot_of = np.full(pages, -1)
    slot_of[page_in[filled]] = filled
    pinned = np.zeros(pages)
    pinned[random.permutation(np.setdiff1d(np.arange(pages), mine))[:2]] = 1
    last_used = random.integers(0, tick, slots)
    return triton_slots.Tables(
        ints(slot_of), ints(page_in), ints(last_used), torch.tensor(pinned, device=DEVICE).to(torch.uint8)
    )


def check_claims(before, tables, out, wanted: np.ndarray, tick: int) -> None:
    """Every wanted page is resident, each slot holds one page, and victims were the least recently used."""
    slot_of, page_in, used = (getattr(tables, name).cpu().numpy() for name in ("slot_of", "page_in", "last_used"))
    assert (slot_of[wanted] >= 0).all() and (used[slot_of[wanted]] == tick).all()
    full = np.flatnonzero(page_in >= 0)
    assert (slot_of[page_in[full]] == full).all() and (slot_of >= 0).sum() == len(full)
    missing = int(out.count)
    misses, places = out.pages[:missing].tolist(), out.places[:missing].tolist()
    assert [int(slot_of[page]) for page in misses] == places
    old = {name: table.cpu().numpy() for name, table in before.items()}
    age = np.where(old["page_in"] < 0, -1, old["last_used"])
    locked = (old["page_in"] >= 0) & (tables.pinned.cpu().numpy()[np.maximum(old["page_in"], 0)] != 0)
    resident = old["slot_of"][wanted]
    age[resident[resident >= 0]] = tick
    free = np.flatnonzero((age != tick) & ~locked)
    assert places == free[np.argsort(age[free], kind="stable")][:missing].tolist()


def test_opened_pages_take_free_then_oldest_slots_and_are_zero():
    layers, slots, pages = 2, 6, 9
    pool = torch.full((layers, slots, 2, 1, PAGE, 16), float("nan"), device=DEVICE)
    page_in = np.array([[0, 1, 2, 3, -1, 4], [4, 3, 2, 1, 0, -1]])
    slot_of = np.full((layers, pages), -1)
    for layer in range(layers):
        for slot, page in enumerate(page_in[layer]):
            if page >= 0:
                slot_of[layer, page] = slot
    pinned = torch.zeros(pages, dtype=torch.uint8, device=DEVICE)
    pinned[0] = 1
    tables = triton_slots.Tables(ints(slot_of), ints(page_in), ints([[1, 2, 3, 1, 0, 5]] * 2), pinned)
    triton_slots.open_pages(ints([7, 8]), pool, tables, ints(np.zeros((layers, 8))), geometry(TICK=6))
    assert tables.page_in.tolist() == [[0, 1, 2, 8, 7, 4], [8, 3, 2, 1, 0, 7]]
    assert tables.slot_of[:, 7].tolist() == [4, 5] and tables.slot_of[:, 8].tolist() == [3, 0]
    assert int(tables.slot_of[0, 3]) == -1 and int(tables.slot_of[1, 4]) == -1
    assert (pool[0, [3, 4]] == 0).all() and (pool[1, [0, 5]] == 0).all() and pool[0, 0].isnan().all()


@pytest.mark.parametrize("dim", [64, 80])
def test_appended_tokens_are_rotated_and_stored_where_they_belong(dim):
    heads, kv_heads, tokens, first = 4, 2, 5, 62
    scene = Scene(dim, heads, kv_heads, tokens, first, 2, torch.bfloat16)
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE).to(torch.bfloat16)
    q, k, v = fused.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    turned = torch.empty(tokens, heads, dim, device=DEVICE)
    offsets = scene.rope.cos_sin(torch.arange(2 * PAGE, device=DEVICE))
    state = geometry(PAST=2, FIRST=first)
    triton_pages.append(q, k, v, turned, scene.pool, ints(scene.slot_of), ints(scene.ids), state, offsets)
    rows = torch.arange(first, first + tokens, device=DEVICE)
    torch.testing.assert_close(turned, rotate(q.float(), *scene.rope.cos_sin(rows)), atol=1e-5, rtol=1e-5)
    keys = rotate(k, *scene.rope.cos_sin(rows % PAGE))
    for index, row in enumerate(rows.tolist()):
        slot = scene.slot_of[scene.ids[2 + row // PAGE]]
        torch.testing.assert_close(scene.pool[slot, 0, :, row % PAGE], keys[index], atol=1e-2, rtol=1e-2)
        assert torch.equal(scene.pool[slot, 1, :, row % PAGE], v[index])


def test_bytes_survive_the_way_to_the_host_and_back():
    layers, slots, pages = 2, 5, 7
    pool = torch.randn(layers, slots, 2, 2, PAGE, 16, device=DEVICE).to(torch.bfloat16)
    host = torch.zeros(pages, layers, 2, 2, PAGE, 16, dtype=torch.bfloat16)
    host = host.pin_memory() if CUDA else host
    where = torch.tensor([[3, 1], [0, 4]], device=DEVICE)
    triton_pages.store_pages(pool, host, where, torch.tensor([6, 2], device=DEVICE), 3)
    if CUDA:
        torch.cuda.synchronize()
    for layer, page, slot in ((0, 6, 3), (0, 2, 1), (1, 6, 0), (1, 2, 4)):
        assert torch.equal(host[page, layer], pool[layer, slot].cpu())
    back = torch.zeros_like(pool[1])
    triton_pages.gather(host[:, 1], back, ints([2, 6, 0]), ints([1, 3, 2]), ints([2]), 4)
    assert torch.equal(back[1], pool[1, 4]) and torch.equal(back[3], pool[1, 0]) and not back[2].any()


@pytest.mark.parametrize("dim", [64, 80])
def test_staged_pages_are_rotated_to_the_chunk_and_cold_ones_come_from_the_host(dim):
    scene = Scene(dim, 2, 2, 1, 0, 4, torch.float32, cold=(1, 3))
    pages = torch.tensor(scene.ids[:4], device=DEVICE)
    slots = torch.tensor(scene.slot_of[scene.ids[:4]], device=DEVICE)
    distance = torch.tensor([4, 3, 2, 1], device=DEVICE)
    keys, values = (torch.empty(2, 4 * PAGE, dim, device=DEVICE) for _ in range(2))
    triton_pages.stage(scene.pool, scene.host[:, 0], slots, pages, distance, scene.turns, keys, values, 3)
    plain = scene.kv[:4, 0].reshape(4, 2 * PAGE, dim)
    wanted = rotate(plain, *scene.rope.page_turns(-distance.cpu().numpy())).view(4, 2, PAGE, dim)
    torch.testing.assert_close(keys.view(2, 4, PAGE, dim), wanted.transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert torch.equal(values.view(2, 4, PAGE, dim), scene.kv[:4, 1].transpose(0, 1))


def test_the_passes_between_the_products():
    torch.manual_seed(3)
    x, y = torch.randn(3, 200, device=DEVICE), torch.randn(3, 200, device=DEVICE)
    w = torch.rand(200, device=DEVICE)
    total, normed = triton_layers.add_rms_norm(x, y, w, 1e-5)
    torch.testing.assert_close(total, x + y)
    torch.testing.assert_close(normed, rms_norm(x + y, w, 1e-5))
    torch.testing.assert_close(triton_layers.add_rms_norm(x, None, w, 1e-5)[1], rms_norm(x, w, 1e-5))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(triton_layers.swiglu(x), torch.nn.functional.silu(gate) * up)
    for tokens in (1, 2):
        qkv = torch.randn(tokens, 13 * 80, device=DEVICE)
        plain, a, b = qkv.clone().view(tokens, 13, 80), torch.rand(80, device=DEVICE), torch.rand(80, device=DEVICE)
        triton_layers.head_norm(*qkv.view(tokens, 13, 80).split([9, 2, 2], 1)[:2], a, b, 1e-6)
        got = qkv.view(tokens, 13, 80)
        torch.testing.assert_close(got[:, :9], rms_norm(plain[:, :9], a, 1e-6))
        torch.testing.assert_close(got[:, 9:11], rms_norm(plain[:, 9:11], b, 1e-6))
        assert torch.equal(got[:, 11:], plain[:, 11:])
    out, lse = torch.randn(3, 2, 80, device=DEVICE), torch.randn(2, 3, device=DEVICE)
    more, other = torch.randn(3, 2, 80, device=DEVICE), torch.randn(2, 3, device=DEVICE)
    share = torch.sigmoid(other - lse).T[..., None]
    wanted, both = out * (1 - share) + more * share, torch.logaddexp(lse, other)
    triton_layers.merge_into(out, lse, more, other)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, both)


# --- pages that hold codes ------------------------------------------------------------------------------------------

CODED = [name for name in KV if not KV[name].plain]
CASES = [("int8", 64), ("k8v4", 64), ("k8v4", 80), ("int4", 96), ("fp8", 64), ("fp8", 16)]


class CodedScene(Scene):
    """The same scene, its pages written by the torch form; `kv` is what they hold."""

    def __init__(self, name: str, dim: int, *more, cold=()) -> None:
        super().__init__(dim, *more, torch.float32, cold)
        self.form = Form(KV[name], self.kv_heads, dim)
        token = torch.arange(len(self.kv) * PAGE, device=DEVICE)
        stored = torch.zeros(len(self.kv), *self.form.shape, dtype=torch.uint8, device=DEVICE)
        numbers = self.kv.permute(1, 0, 3, 2, 4).reshape(2, len(token), self.kv_heads, dim)
        self.form.write(stored, token // PAGE, token % PAGE, *(numbers * torch.linspace(0.1, 9, dim, device=DEVICE)))
        self.kv, self.stored = self.form.decode(stored, torch.float32), stored
        self.pool = torch.full((len(self.pool), *self.form.shape), 255, dtype=torch.uint8, device=DEVICE)
        self.host = torch.full((len(self.host), 1, *self.form.shape), 255, dtype=torch.uint8)
        self.host = self.host.pin_memory() if CUDA else self.host
        for page, identity in enumerate(self.ids):
            self.host[identity, 0] = stored[page].cpu()
            if self.slot_of[identity] >= 0:
                self.pool[self.slot_of[identity]] = stored[page]


@pytest.mark.parametrize(("name", "dim"), CASES)
def test_attention_reads_codes_as_the_reference_decodes_them(name, dim):
    scene = CodedScene(name, dim, 4, 2, 2, 63, 3, cold={1})
    attention = PagedAttention(4, 2, dim, 8, DEVICE, 8)
    counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=DEVICE)
    for pages in (None, [0, 2]):
        seen = [0, 1, 2] if pages is None else pages
        state = geometry(PAST=3, FIRST=63, OWN=scene.own, WINDOW=len(seen))
        for dtype in (torch.float32, torch.bfloat16):
            out = attention(
                scene.q,
                scene.pool,
                scene.host[:, 0] if pages is None else None,
                ints(scene.slot_of),
                ints(scene.ids),
                None if pages is None else ints([*pages, 0]),
                state,
                scene.turns,
                counters,
                scene.rope.score_scale,
                False,
                scene.form.layout,
                dtype=dtype,
            )
            wanted = scene.reference(seen, False)
            near = {torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype] * float(wanted.abs().max())
            torch.testing.assert_close(out.float(), wanted, atol=near, rtol=0)


@pytest.mark.parametrize(("name", "dim"), CASES)
def test_appended_tokens_become_the_codes_of_the_reference(name, dim):
    scene = CodedScene(name, dim, 4, 2, 5, 62, 2)
    q, k, v = (torch.randn(5, heads, dim, device=DEVICE) * 3 for heads in (4, 2, 2))
    k[0, 0], v[1, 1] = 0, 0
    k[2, 1, 3] = v[3, 0, 5] = float("nan")
    before, turned = scene.pool.clone(), torch.empty(5, 4, dim, device=DEVICE)
    offsets = scene.rope.cos_sin(torch.arange(2 * PAGE, device=DEVICE))
    triton_pages.append(
        q,
        k,
        v,
        turned,
        scene.pool,
        ints(scene.slot_of),
        ints(scene.ids),
        geometry(PAST=2, FIRST=62),
        offsets,
        scene.form.layout,
    )
    rows = torch.arange(62, 67, device=DEVICE)
    place = torch.tensor([scene.slot_of[scene.ids[2 + int(row) // PAGE]] for row in rows], device=DEVICE)
    scene.form.write(before, place, rows % PAGE, rotate(k, *scene.rope.cos_sin(rows % PAGE)), v)
    got, wanted = (scene.form.decode(data, torch.float32) for data in (scene.pool, before))
    for part in (0, 1):
        a, b = (numbers[place, part, :, rows % PAGE] for numbers in (got, wanted))
        assert torch.equal(a.isfinite(), b.isfinite()) and b.isnan().any(-1).sum() == 1
        # A product that was rounded otherwise may fall on the other side of a step, here and there.
        near = (a - b).abs().nan_to_num() <= 1e-5 + 1e-4 * b.abs().nan_to_num()
        assert near.float().mean() > 0.99
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[place.cpu()] = False
    assert torch.equal(scene.pool[untouched], before[untouched])
    kept = [part[place[0]].view(torch.uint8)[:, :62] for part in scene.form.views(scene.pool)]
    assert all(
        torch.equal(a, b[place[0]].view(torch.uint8)[:, :62])
        for a, b in zip(kept, scene.form.views(before), strict=True)
    )


@pytest.mark.parametrize(("name", "dim"), CASES)
def test_key_codes_of_closed_pages_are_made_from_what_the_pages_hold(name, dim):
    scene = CodedScene(name, dim, 2, 2, 1, 0, 2)
    codes = torch.zeros(2, 12, PAGE, dim // 2, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(2, 12, PAGE, device=DEVICE)
    ids = torch.tensor(scene.ids[:2], device=DEVICE)
    slots = torch.tensor(scene.slot_of[scene.ids[:2]], device=DEVICE)[None]
    groups = ints([[0, 0], [0, 1]])
    triton_pages.close_pages(scene.pool[None], slots, ids, codes, scales, groups, scene.form.layout)
    expected, sizes = encode_keys(scene.kv[:2, 0].transpose(0, 1).cpu())
    assert torch.equal(codes[:, ids].cpu(), pack_codes(expected)) and torch.equal(scales[:, ids].cpu(), sizes)


@pytest.mark.parametrize(("name", "dim"), CASES)
def test_staged_codes_are_the_numbers_that_they_stand_for(name, dim):
    scene = CodedScene(name, dim, 2, 2, 1, 0, 4, cold=(1, 3))
    pages = torch.tensor(scene.ids[:4], device=DEVICE)
    slots = torch.tensor(scene.slot_of[scene.ids[:4]], device=DEVICE)
    distance = torch.tensor([4, 3, 2, 1], device=DEVICE)
    keys, values = (torch.empty(2, 4 * PAGE, dim, device=DEVICE) for _ in range(2))
    triton_pages.stage(
        scene.pool, scene.host[:, 0], slots, pages, distance, scene.turns, keys, values, 3, scene.form.layout
    )
    plain = scene.kv[:4, 0].reshape(4, 2 * PAGE, dim)
    wanted = rotate(plain, *scene.rope.page_turns(-distance.cpu().numpy())).view(4, 2, PAGE, dim)
    torch.testing.assert_close(keys.view(2, 4, PAGE, dim), wanted.transpose(0, 1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(values.view(2, 4, PAGE, dim), scene.kv[:4, 1].transpose(0, 1))
