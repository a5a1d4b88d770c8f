#include "delta/patch.h"

#include <exception>
#include <mutex>

#include "delta/digest.h"
#include "delta/terms.h"
#include "parallel.h"

namespace mcr::delta {
namespace {

// `parallel`, for pieces that may throw: the first exception comes out of it.
template <class F>
void each_in_parallel(size_t pieces, size_t bytes, F&& piece) {
  std::mutex mutex;
  std::exception_ptr error;
  parallel(pieces, threads_for(bytes), [&](size_t i) {
    try {
      piece(i);
      return true;
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      return false;
    }
  });
  if (error) std::rethrow_exception(error);
}

template <class T, Mode kMode>
Change apply_to(const Decoder& decoder, const Segment& segment, const Box& box) {
  Change change;
  Walk walk(box);
  decoder.each([&](uint64_t position, uint64_t step, uint64_t later) {
    position += segment.begin, later += segment.begin;
    if (position >= walk.end || position < walk.begin) walk.seek(position);
    if (walk.here(later)) __builtin_prefetch(walk.address_of(later), kMode != Mode::kCheck);  // changes are too far apart for the processor to see
    if (!walk.here(position)) return;
    std::byte* at = walk.address_of(position);
    const uint64_t index = walk.index_of(position);
    T was;
    std::memcpy(&was, at, sizeof was);
    const T is = kMode == Mode::kRevert ? T(was - T(step)) : T(was + T(step));
    change.digest += term(is, index) - term(was, index);
    ++change.changed;
    if (kMode != Mode::kCheck) std::memcpy(at, &is, sizeof is);
  });
  return change;
}

template <class T>
Change apply_to(const Decoder& decoder, const Segment& segment, const Box& box, Mode mode) {
  switch (mode) {
    case Mode::kCheck: return apply_to<T, Mode::kCheck>(decoder, segment, box);
    case Mode::kApply: return apply_to<T, Mode::kApply>(decoder, segment, box);
    default: return apply_to<T, Mode::kRevert>(decoder, segment, box);
  }
}

Change apply_to(const Decoder& decoder, const Segment& segment, const Box& box, Mode mode) {
  switch (box.log) {
    case 0: return apply_to<uint8_t>(decoder, segment, box, mode);
    case 1: return apply_to<uint16_t>(decoder, segment, box, mode);
    case 2: return apply_to<uint32_t>(decoder, segment, box, mode);
    default: return apply_to<uint64_t>(decoder, segment, box, mode);
  }
}

// A box that is the region itself, and lies packed.
Box packed(uint64_t elements, int log) {
  Box box;
  box.log = log;
  box.dims.push_back({int64_t(elements), 1, 0, int64_t(elements), int64_t{1} << log});
  return box;
}

// The elements of a segment in a box, packed: where they lie, or in `copy`. nullptr if not all of them are in the box.
const std::byte* packed_in(const Segment& segment, const Box& box, std::vector<std::byte>& copy) {
  const int64_t item = int64_t{1} << box.log;
  Walk walk(box);
  const uint64_t end = segment.begin + segment.elements;
  for (uint64_t at = segment.begin; at < end; at = walk.end) {
    walk.seek(at);
    const uint64_t last = std::min(end, walk.end) - 1;
    if (!walk.here(at) || !walk.here(last)) return nullptr;
    const bool adjacent = box.dims.back().stride == item;
    if (adjacent && at == segment.begin && last + 1 == end) return walk.address_of(at);
    copy.resize(size_t(segment.elements) << box.log);
    std::byte* to = &copy[size_t(at - segment.begin) << box.log];
    if (adjacent)
      std::memcpy(to, walk.address_of(at), size_t(last + 1 - at) << box.log);
    else
      for (uint64_t i = at; i <= last; ++i, to += item) std::memcpy(to, walk.address_of(i), size_t(item));
  }
  return copy.data();
}

// Those that hold something, and where they begin.
Encoded gathered(std::vector<Segment> segments, std::vector<Bytes> coded) {
  Encoded out;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (!segments[i].changed) continue;
    segments[i].nbytes = uint32_t(coded[i].size());
    segments[i].offset = out.nbytes;
    out.nbytes += coded[i].size();
    out.segments.push_back(segments[i]);
    out.coded.push_back(std::move(coded[i]));
  }
  return out;
}

void finish(Segment& segment, Bytes& coded, Change change) {
  segment.changed = uint32_t(change.changed);
  segment.digest = change.digest;
  segment.checksum = checksum(coded.data(), coded.size());
  segment.form = coded.front();
  coded.shrink_to_fit();
}

size_t sum_of(const std::vector<Part>& parts) {
  size_t n = 0;
  for (const Part& p : parts) n += p.segment.nbytes;
  return n;
}

}  // namespace

void Encoded::write(std::byte* to) const {
  for (const Bytes& b : coded) {
    std::memcpy(to, b.data(), b.size());
    to += b.size();
  }
}

Encoded encode(const std::vector<Region>& regions) {
  std::vector<Segment> segments;
  size_t bytes = 0;
  for (size_t r = 0; r < regions.size(); ++r) {
    const uint64_t n = regions[r].elements, most = segment_elements(regions[r].row_elements);
    for (uint64_t begin = 0; begin < n; begin += most)
      segments.push_back({begin, 0, 0, 0, uint32_t(std::min(most, n - begin)), 0, 0, uint32_t(r), 0, 0});
    bytes += size_t(n) << regions[r].index.log;
  }
  std::vector<Bytes> coded(segments.size());
  each_in_parallel(segments.size(), bytes, [&](size_t i) {
    thread_local Encoder encoder;
    Segment& s = segments[i];
    const Region& r = regions[s.region];
    const size_t offset = size_t(s.begin) << r.index.log;
    const Change change = encoder.encode(r.old + offset, r.now + offset, s.elements, r.index.log, r.index, s.begin, r.classing, coded[i]);
    if (change.changed) finish(s, coded[i], change);
  });
  return gathered(std::move(segments), std::move(coded));
}

std::vector<size_t> damaged(const std::vector<Part>& parts) {
  std::vector<uint8_t> bad(parts.size());
  parallel(parts.size(), threads_for(sum_of(parts)), [&](size_t i) {
    bad[i] = checksum(parts[i].coded, parts[i].segment.nbytes) != parts[i].segment.checksum;
    return true;
  });
  std::vector<size_t> out;
  for (size_t i = 0; i < bad.size(); ++i)
    if (bad[i]) out.push_back(i);
  return out;
}

std::vector<Outcome> apply(const std::vector<Part>& parts, const std::vector<const Box*>& boxes, Mode mode) {
  std::vector<Outcome> out(parts.size());
  auto fits = [&](size_t i) {
    const Segment& s = parts[i].segment;
    const uint64_t there = uint64_t(boxes[i]->elements());
    return s.elements <= kMostElements && s.elements <= there && s.begin <= there - s.elements;
  };
  std::vector<size_t> first;  // those that are coded against what was there
  for (size_t i = 0; i < parts.size(); ++i)
    if (needs_old(parts[i].coded, parts[i].segment.nbytes) && fits(i)) first.push_back(i);
  std::vector<Decoder> decoded(first.size());
  each_in_parallel(first.size(), 8 * sum_of(parts), [&](size_t k) {
    thread_local std::vector<std::byte> copy;
    const size_t i = first[k];
    const Segment& s = parts[i].segment;
    out[i].what = Outcome::kStale;
    const std::byte* old = mode == Mode::kRevert ? nullptr : packed_in(s, *boxes[i], copy);
    if (!old || !decoded[k].decode(parts[i].coded, s.nbytes, s.elements, s.changed, boxes[i]->log, old)) return;
    out[i].change = apply_to(decoded[k], s, *boxes[i], Mode::kCheck);
    if (out[i].change.digest == s.digest) out[i].what = Outcome::kDone;
    decoded[k].forget();
  });
  if (std::any_of(out.begin(), out.end(), [](const Outcome& o) { return o.what == Outcome::kStale; })) {
    for (Outcome& o : out)
      if (o.what != Outcome::kStale) o = {Outcome::kLeft, {}};
    return out;
  }
  each_in_parallel(parts.size(), 8 * sum_of(parts), [&](size_t i) {
    thread_local Decoder decoder;
    const Segment& s = parts[i].segment;
    const Box& box = *boxes[i];
    if (out[i].what == Outcome::kDone) {
      const size_t k = size_t(std::lower_bound(first.begin(), first.end(), i) - first.begin());
      if (mode != Mode::kCheck) apply_to(decoded[k], s, box, mode);
      return;
    }
    if (!fits(i) || !decoder.decode(parts[i].coded, s.nbytes, s.elements, s.changed, box.log, nullptr)) return;
    out[i].change = apply_to(decoder, s, box, mode);
    out[i].what = Outcome::kDone;
  });
  return out;
}

Encoded merge(const std::vector<Chain>& chains, std::vector<size_t>& bad) {
  std::vector<Segment> segments(chains.size());
  std::vector<Bytes> coded(chains.size());
  std::vector<uint8_t> failed(chains.size());
  size_t bytes = 0;
  for (const Chain& c : chains) bytes += 8 * sum_of(c.parts);
  each_in_parallel(chains.size(), bytes, [&](size_t i) {
    thread_local Decoder decoder;
    thread_local Encoder encoder;
    thread_local std::vector<std::byte> sums;
    const Chain& chain = chains[i];
    Segment& s = segments[i] = chain.parts.front().segment;
    s.changed = 0;
    if (s.elements > kMostElements) {
      failed[i] = 1;
      return;
    }
    const size_t nbytes = size_t(s.elements) << chain.log;
    if (chain.old)
      sums.assign(chain.old, chain.old + nbytes);
    else
      sums.assign(nbytes, std::byte{0});
    Box box = packed(s.elements, chain.log);
    box.at = sums.data();
    uint64_t digest = 0;
    for (const Part& p : chain.parts) {
      if (p.segment.elements != s.elements || !decoder.decode(p.coded, p.segment.nbytes, s.elements, p.segment.changed, chain.log,
                                                             chain.old ? sums.data() : nullptr)) {
        failed[i] = 1;
        return;
      }
      Segment here = p.segment;
      here.begin = 0;
      apply_to(decoder, here, box, Mode::kApply);
      digest += p.segment.digest;
    }
    const Change change = encoder.encode(chain.old, sums.data(), s.elements, chain.log, box, 0, chain.classing, coded[i]);
    if (change.changed) finish(s, coded[i], {change.changed, digest});
  });
  for (size_t i = 0; i < failed.size(); ++i)
    if (failed[i]) bad.push_back(i);
  return gathered(std::move(segments), std::move(coded));
}

}  // namespace mcr::delta
