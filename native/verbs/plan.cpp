#include "plan.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "error.h"

namespace mcr::verbs {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kSmallest = 64 << 10;  // bytes: about a microsecond of a fast wire
constexpr uint64_t kUsual = 1 << 20;      // bytes: a read this long runs at full speed
constexpr uint64_t kEach = 4;             // chunks a queue should get

[[noreturn]] void refuse(size_t at, const Range& r, const std::string& why) {
  throw Error(Failure::kTransport,
              "range " + std::to_string(at) + ": " + std::to_string(r.bytes) + " bytes at " + std::to_string(r.offset) + " of region " +
                  std::to_string(r.region) + ": " + why,
              "read", EINVAL);
}

// The piece that an address lies in, or null.
const Piece* piece_of(std::span<const Piece> pieces, uint64_t address) {
  const auto after = std::upper_bound(pieces.begin(), pieces.end(), address, [](uint64_t a, const Piece& p) { return a < p.address; });
  if (after == pieces.begin()) return nullptr;
  const Piece& p = *std::prev(after);
  return address - p.address < p.bytes ? &p : nullptr;
}

}  // namespace

std::vector<Chunk> cut(std::span<const Range> ranges, const Regions& regions, std::span<const Piece> mine, uint32_t largest) {
  if (!largest) throw Error(Failure::kTransport, "a chunk has at least one byte", "read", EINVAL);
  std::vector<Chunk> out;
  out.reserve(ranges.size());
  const Region* region = nullptr;
  uint64_t number = 0;
  for (size_t at = 0; at < ranges.size();) {
    const size_t first = at;
    Range r = ranges[at++];
    if (!r.bytes) continue;
    if (!region || number != r.region) {
      const auto found = regions.find(r.region);
      if (found == regions.end()) refuse(first, r, "the peer has no such region");
      region = &found->second;
      number = r.region;
    }
    if (r.bytes > region->bytes || r.offset > region->bytes - r.bytes)
      refuse(first, r, "it has " + std::to_string(region->bytes) + " bytes");
    for (; at < ranges.size(); ++at) {
      const Range& next = ranges[at];
      if (next.region != r.region || next.offset != r.offset + r.bytes || next.local != r.local + r.bytes) break;
      if (next.bytes > region->bytes - next.offset) break;  // refused when its turn comes
      r.bytes += next.bytes;
    }
    uint64_t remote = region->address + r.offset;
    const Piece* there = nullptr;
    const Piece* here = nullptr;
    while (r.bytes) {
      if (!here || r.local - here->address >= here->bytes) here = piece_of(mine, r.local);
      if (!here) refuse(first, ranges[first], "the memory to read into is not registered");
      if (!there || remote - there->address >= there->bytes) there = piece_of(region->pieces, remote);
      if (!there) refuse(first, ranges[first], "the peer has not registered all of it");
      const uint64_t left_here = here->bytes - (r.local - here->address), left_there = there->bytes - (remote - there->address);
      const uint64_t n = std::min({r.bytes, uint64_t(largest), left_here, left_there});
      out.push_back({r.local, remote, uint32_t(here - mine.data()), uint32_t(n), there});
      r.local += n;
      remote += n;
      r.bytes -= n;
    }
  }
  return out;
}

std::vector<size_t> best_ways(std::span<const Way> ways, RailSet near_here, RailSet near_there) {
  std::vector<size_t> best;
  int most = -1;
  for (size_t i = 0; i < ways.size(); ++i) {
    const int good = 2 * contains(near_there, ways[i].theirs) + contains(near_here, ways[i].mine);
    if (good < most) continue;
    if (good > most) best.clear();
    most = good;
    best.push_back(i);
  }
  return best;
}

std::vector<Batch> batches(std::vector<Chunk> chunks, std::span<const Piece> mine, std::span<const Way> ways) {
  std::vector<Batch> out;
  std::map<std::pair<RailSet, RailSet>, size_t> known;  // which batch
  const auto batch_of = [&](const Chunk& c) {
    const std::pair near{mine[c.local_piece].near, c.remote_piece->near};
    const auto [found, fresh] = known.try_emplace(near, out.size());
    if (!fresh) return found->second;
    std::vector<size_t> best = best_ways(ways, near.first, near.second);
    const auto same = std::find_if(out.begin(), out.end(), [&](const Batch& b) { return b.ways == best; });
    found->second = size_t(same - out.begin());
    if (same == out.end()) out.push_back({std::move(best), {}, 0});
    return found->second;
  };
  for (size_t first = 0; first < chunks.size();) {
    const size_t batch = batch_of(chunks[first]);
    size_t end = first + 1;
    while (end < chunks.size() && batch_of(chunks[end]) == batch) ++end;
    if (!first && end == chunks.size()) {  // nearly always
      out[batch].chunks = std::move(chunks);
      break;
    }
    out[batch].chunks.insert(out[batch].chunks.end(), chunks.begin() + ptrdiff_t(first), chunks.begin() + ptrdiff_t(end));
    first = end;
  }
  return out;
}

uint32_t chunk_bytes(uint64_t bytes, size_t queues, uint32_t largest) {
  const uint64_t share = bytes / (std::max<size_t>(queues, 1) * kEach);
  const uint64_t wanted = std::clamp((share + kPage - 1) / kPage * kPage, kSmallest, kUsual);
  return uint32_t(std::min<uint64_t>(wanted, std::max<uint32_t>(largest, 1)));
}

}  // namespace mcr::verbs
