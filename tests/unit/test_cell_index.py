"""The index against a table that holds every cell."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.integrations.cell_index import CellIndex, Missing

ROWS, FIELDS = st.integers(0, 5), st.sampled_from("abcd")
PUTS = st.tuples(st.just("put"), st.lists(ROWS, unique=True), st.sets(FIELDS))
CLEARS = st.tuples(st.just("clear"), st.lists(ROWS), st.none())


@settings(deadline=None)
@given(st.lists(st.one_of(PUTS, CLEARS), max_size=12), st.lists(ROWS, unique=True, max_size=4), st.lists(FIELDS, unique=True))
def test_is_like_a_table_of_cells(steps, rows, fields):
    index, table = CellIndex(), {}
    for number, (what, where, written) in enumerate(steps):
        if what == "put":
            index.put(where, written, number)
            table.update({(row, name): (number, at) for at, row in enumerate(where) for name in written})
        else:
            index.clear(where)
            table = {cell: block for cell, block in table.items() if cell[0] not in where}
    restored = CellIndex()
    restored.put([0], ["gone"], "gone")
    restored.restore(*index.dump())
    assert restored.dump() == index.dump() and restored.stats() == index.stats()
    found = restored.locate(rows, fields)
    assert found == index.locate(rows, fields)
    wanted = {(place, name): table.get((row, name)) for place, row in enumerate(rows) for name in fields}
    if None in wanted.values():
        assert isinstance(found, Missing)
        assert (found.row, found.field) not in table and found.row in rows and found.field in fields
    else:
        cells = [
            ((place, name), (piece.block, row))
            for piece in found
            for row, place in zip(piece.rows, piece.places, strict=True)
            for name in piece.fields
        ]
        assert len(cells) == len(dict(cells)) and dict(cells) == wanted
    assert index.stats() == {"rows": len({row for row, _ in table}), "blocks": len({number for number, _ in table.values()})}


def test_a_read_of_one_put_is_one_piece():
    index = CellIndex()
    index.put([10, 11, 12], ["a", "b"], "block")
    (piece,) = index.locate([12, 10], ["b", "a"])
    assert (piece.block, piece.fields, piece.rows, piece.places) == ("block", ("b", "a"), [2, 0], [0, 1])


def test_blocks_put_after_a_restore_have_numbers_of_their_own():
    index = CellIndex()
    index.restore({7: ((3, 0, frozenset("a")),)}, {3: "restored"})
    for row, name in ((8, "b"), (9, "c"), (10, "d"), (11, "e")):
        index.put([row], "a", name)
    assert [piece.block for piece in index.locate([7, 8, 9, 10, 11], "a")] == ["restored", "b", "c", "d", "e"]
    index.clear([7])
    assert index.stats() == {"rows": 4, "blocks": 4}
