// How ranges of a peer's memory are cut into the reads that devices can do. Pure: touches no device and no memory.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace mcr::verbs {

// What a caller wants: `bytes` bytes from `offset` of the peer's `region` on, at address `local` of this process. Laid out as the rows of a
// table of four numbers.
struct Range {
  uint64_t region, offset, local, bytes;
};

// A set of rails: bit i is rail i. Those beyond the last bit are in every set.
using RailSet = uint64_t;
constexpr RailSet kAllRails = ~RailSet(0);
constexpr bool contains(RailSet set, size_t rail) { return rail >= 64 || (set >> rail & 1); }

// A piece of memory that is registered as one: by this process, or by the peer.
struct Piece {
  uint64_t address, bytes;
  std::vector<uint32_t> keys;  // one a rail
  RailSet near = kAllRails;    // the rails of its owner that are on its own NUMA node
};

// A peer's region: pieces that follow one another without a gap.
struct Region {
  uint64_t address = 0, bytes = 0;
  std::vector<Piece> pieces;
};
using Regions = std::unordered_map<uint64_t, Region>;

// One read, which a device can do: inside one piece at either end.
struct Chunk {
  uint64_t local, remote;           // addresses
  uint32_t local_piece;             // index into the pieces of this process
  uint32_t bytes;
  const Piece* remote_piece;
};

// Cuts `ranges` into chunks of at most `largest` bytes, in order. Neighbours in the list that are neighbours in memory, at both ends, are
// one range. `mine`: this process's pieces, sorted by address. Ranges of no bytes are dropped. Throws Error(kTransport, EINVAL) for what is
// inside no region, or not in registered memory; names the range.
std::vector<Chunk> cut(std::span<const Range> ranges, const Regions& regions, std::span<const Piece> mine, uint32_t largest);

// From one of this process's rails to one of the peer's.
struct Way {
  size_t mine, theirs;
};

// Which of the ways, by index, to go between memory that is near to some rails at either end: those that are near at both; if there is none,
// near at the peer, whose device waits for its memory, where this one's need not; else near here; else all.
std::vector<size_t> best_ways(std::span<const Way> ways, RailSet near_here, RailSet near_there);

// Chunks that go the same ways.
struct Batch {
  std::vector<size_t> ways;
  std::vector<Chunk> chunks;
  size_t posted = 0;  // of the chunks
};

// The chunks by their best ways, otherwise in order. `mine`: what `cut` got.
std::vector<Batch> batches(std::vector<Chunk> chunks, std::span<const Piece> mine, std::span<const Way> ways);

// How many bytes a chunk should have, when a list of `bytes` bytes is spread over `queues` queues: few enough that every queue gets some
// and that none has much left when the others are done; enough that a read is not all overhead. A multiple of 4096, or `largest`.
uint32_t chunk_bytes(uint64_t bytes, size_t queues, uint32_t largest);

}  // namespace mcr::verbs
