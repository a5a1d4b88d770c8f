"""The block: a batch as one self-describing run of bytes, of which any rows of any columns can be read alone.

`header | index | buffers`. The index is JSON: a node a column, and for each buffer its offset and size. Encoding builds nodes and says which
bytes go where (`chunk`), and touches no pool; decoding says which bytes it wants (`read`), and does not know where they come from.
"""
