"""The index against a table that holds every cell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake_ray.integrations.cell_index import CellIndex, Missing

ROWS, FIELDS = st.integers(0, 5), st.sampled_from("abcd")
PUTS = st.tuples(st.just("put"), st.lists(ROWS, unique=True), st.sets(FIELDS))
CLEARS = st.tuples(st.just("clear"), st.lists(ROWS), st.none())


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
    found = index.locate(rows, fields)
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
