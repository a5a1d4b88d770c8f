// The codec of changes of weights: loops of every kind of processor, symbols, segments, boxes, objects; and nonsense instead of coded bytes.
// Usage: delta_test [INPUTS [SEED]]
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <random>

#include "check.h"
#include "delta/digest.h"
#include "delta/loops.h"
#include "delta/patch.h"
#include "delta/terms.h"
#include "parallel.h"

using namespace mcr::delta;

namespace {

using Rng = std::mt19937_64;
int inputs = 20'000;
uint64_t seed = 1;

// Memory that is exactly as large as it may be, so that what reads or writes beyond is found.
Bytes exactly(size_t n) { return Bytes(n); }

Bytes noise(size_t n, Rng& rng) {
  Bytes out = exactly(n);
  for (uint8_t& b : out) b = uint8_t(rng());
  return out;
}

const std::byte* bytes_of(const Bytes& b) { return reinterpret_cast<const std::byte*>(b.data()); }
std::byte* bytes_of(Bytes& b) { return reinterpret_cast<std::byte*>(b.data()); }

uint64_t element(const Bytes& data, size_t i, int log) {
  uint64_t v = 0;
  std::memcpy(&v, data.data() + (i << log), size_t{1} << log);
  return v;
}
void set_element(Bytes& data, size_t i, int log, uint64_t v) { std::memcpy(data.data() + (i << log), &v, size_t{1} << log); }

// Changes that fraction of n elements, by small steps or to anything.
Bytes changed(const Bytes& old, size_t n, int log, double fraction, bool small, Rng& rng) {
  Bytes out = old;
  for (size_t i = 0; i < n; ++i) {
    if (std::generate_canonical<double, 32>(rng) >= fraction) continue;
    set_element(out, i, log, small ? element(out, i, log) + (rng() % 2 ? 1 : ~uint64_t{0}) : rng());
  }
  return out;
}

std::vector<const Loops*> all_loops() {
  std::vector<const Loops*> out{&kBaseLoops};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) out.push_back(&kAvx2Loops);
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) out.push_back(&kAvx512Loops);
#endif
  return out;
}

// As weights are: the larger, the rarer; 16 bits of which 7 are below the exponent.
Bytes weights(size_t n, Rng& rng) {
  std::normal_distribution<float> values(0, 0.02f);
  Bytes out = exactly(2 * n);
  for (size_t i = 0; i < n; ++i) {
    const float v = values(rng);
    std::memcpy(&out[2 * i], reinterpret_cast<const char*>(&v) + 2, 2);
  }
  return out;
}

// Weights after a step that is about as long for all of them, so that the smaller ones change more often, and by more.
Bytes stepped(const Bytes& old, Rng& rng) {
  Bytes out = old;
  for (size_t i = 0; i < old.size() / 2; ++i) {
    const uint64_t bits = element(old, i, 1);
    const int below = 116 - int(bits >> 7 & 255);  // the binary logarithm of the step in units of the last place
    const double step = std::ldexp(1, std::min(below, 6));
    const uint64_t whole = uint64_t(step + std::generate_canonical<double, 32>(rng));
    set_element(out, i, 1, rng() % 2 ? bits + whole : bits - whole);
  }
  return out;
}

TEST(loops_agree_with_terms) {
  Rng rng(seed);
  for (const Loops* loops : all_loops())
    for (int round = 0; round < 200; ++round)
      for (int log = 0; log < 4; ++log) {
        const size_t n = rng() % (round % 10 ? 200 : 5000);
        const Bytes a = noise(n << log, rng);
        const uint64_t index = round % 3 ? rng() : (uint64_t{1} << 32) * (rng() % 5) - rng() % (n + 1);
        uint64_t sum = 0;
        for (size_t i = 0; i < n; ++i) sum += term(element(a, i, log), index + i);
        CHECK_EQ(loops->digest[log](a.data(), n, index), sum);
        const Bytes b = changed(a, n, log, round % 4 * 0.1, true, rng);
        std::vector<uint64_t> bits((n + 63) / 64, ~uint64_t{0});
        bool any = false;
        CHECK_EQ(loops->differ[log](a.data(), b.data(), n, bits.data()), a != b);
        for (size_t i = 0; i < n; ++i) {
          const bool differs = element(a, i, log) != element(b, i, log);
          CHECK_EQ(bool(bits[i / 64] >> (i % 64) & 1), differs);
          any |= differs;
        }
        if (n % 64) CHECK_EQ(bits.back() >> (n % 64), 0u);
        const uint64_t magnitude = ~uint64_t{0} >> (65 - (8 << log)), limit = (round % 2 ? rng() % 256 : rng()) & (magnitude << 1 | 1);
        std::vector<uint64_t> least(bits.size(), ~uint64_t{0}), rest(bits.size());
        std::vector<uint8_t> counts(bits.size());
        loops->at_least[log](a.data(), n, limit, least.data());
        for (size_t i = 0; i < bits.size() * 64; ++i)
          CHECK_EQ(bool(least[i / 64] >> (i % 64) & 1), i < n && (element(a, i, log) & magnitude) >= limit);
        loops->without(bits.data(), least.data(), bits.size(), rest.data(), counts.data());
        for (size_t w = 0; w < bits.size(); ++w) {
          CHECK_EQ(rest[w], bits[w] & ~least[w]);
          CHECK_EQ(int(counts[w]), std::popcount(rest[w]));
        }
        CHECK_EQ(any, a != b);
      }
}

TEST(numbers_as_symbols) {
  Rng rng(seed);
  std::vector<uint64_t> numbers;
  for (uint64_t v = 0; v < 5000; ++v) numbers.push_back(v);
  for (int bit = 0; bit < 64; ++bit)
    for (uint64_t d : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}, rng() >> (63 - bit)}) numbers.push_back((uint64_t{1} << bit) + d);
  Bytes symbols;
  BitWriter writer;
  for (uint64_t v : numbers) {
    const Coded c = coded(v);
    CHECK_EQ(bits_after(c.symbol), unsigned(c.bits));
    symbols.push_back(c.symbol);
    writer.put(v, c.bits);
  }
  writer.end();
  Bytes& out = writer.out;
  out.shrink_to_fit();
  BitReader reader(out.data(), out.size());
  for (size_t i = 0; i < numbers.size(); ++i) CHECK_EQ(first_of(symbols[i]) + reader.get(bits_after(symbols[i])), numbers[i]);
  CHECK(reader.whole());
  BitReader shorter(out.data(), out.size() - 1);
  for (uint8_t s : symbols) shorter.get(bits_after(s));
  CHECK(!shorter.whole());
}

TEST(symbols_come_back) {
  Rng rng(seed);
  for (int round = 0; round < 3000; ++round) {
    const size_t n = rng() % (round % 20 ? 100 : 20000), kinds = 1 + rng() % (round % 2 ? 256 : 6);
    const double skew = 1 + double(rng() % 6);
    Bytes symbols = exactly(n);
    for (uint8_t& s : symbols) s = uint8_t(double(kinds) * std::pow(std::generate_canonical<double, 32>(rng), skew));
    Bytes out = noise(rng() % 3, rng);
    const size_t before = out.size();
    put_symbols(symbols.data(), n, out);
    CHECK(out.size() - before <= n + 1);
    Bytes coded(out.begin() + long(before), out.end()), back = exactly(n);
    CHECK(get_symbols(coded.data(), coded.size(), n, back.data()));
    CHECK(back == symbols);
    // About as many bits as there is information in them.
    if (n > 1000) {
      double information = 0;
      for (size_t s = 0; s < 256; ++s)
        if (const double count = double(std::count(symbols.begin(), symbols.end(), uint8_t(s)))) information += count * std::log2(double(n) / count);
      CHECK(double(coded.size()) <= information / 8 * 1.02 + 2.0 * double(kinds) + 32);
    }
    // Any other length is refused; other bytes are too, or something else comes of them.
    if (n && !coded.empty()) {
      Bytes less(coded.begin(), coded.end() - 1);
      CHECK(!get_symbols(less.data(), less.size(), n, back.data()));
    }
    if (!coded.empty()) {
      coded[rng() % coded.size()] ^= uint8_t(1 << rng() % 8);
      get_symbols(coded.data(), coded.size(), n, back.data());
    }
  }
}

// A region that is a tensor of its own.
Box plain(std::vector<int64_t> extents, int log) {
  Box box;
  box.log = log;
  int64_t step = 1;
  for (size_t k = extents.size(); k-- > 0;) {
    box.dims.insert(box.dims.begin(), {extents[k], step, 0, extents[k], step << log});
    step *= extents[k];
  }
  box.simplify();
  return box;
}

TEST(segments_come_back) {
  Rng rng(seed);
  Encoder encoder;
  Decoder decoder;
  int classed = 0;
  for (int round = 0; round < 1500; ++round) {
    const int log = round % 15 ? int(rng() % 4) : 1;
    const bool large = round % 15 == 0;
    const size_t n = 1 + rng() % (large ? 60000 : 300);
    const double fractions[] = {0, 0.001, 0.02, 0.2, 0.3, 1};
    const bool from_zeros = rng() % 4 == 0;
    const bool trained = log == 1 && !from_zeros && (large || rng() % 2);
    const Bytes old = from_zeros ? Bytes(n << log) : trained ? weights(n, rng) : noise(n << log, rng);
    const Bytes now = trained ? stepped(old, rng) : changed(old, n, log, fractions[rng() % 6], rng() % 2, rng);
    Bytes out;
    const Classing classing{trained ? 7 : int(rng() % 4) * 4 - 1, rng() % 2 == 0};
    const Change change = encoder.encode(from_zeros ? nullptr : bytes_of(old), bytes_of(now), n, log, plain({int64_t(n)}, log), 0, classing, out);
    uint64_t count = 0, digest = 0;
    for (size_t i = 0; i < n; ++i) {
      count += element(old, i, log) != element(now, i, log);
      digest += term(element(now, i, log), i) - term(element(old, i, log), i);
    }
    CHECK_EQ(change.changed, count);
    CHECK_EQ(change.digest, digest);
    CHECK(out.size() <= (n << log) + 1 + 14);
    CHECK_EQ(out.empty(), count == 0);
    if (!count) continue;
    Bytes coded = exactly(out.size()), back = old;
    std::copy(out.begin(), out.end(), coded.begin());
    const std::byte* base = needs_old(coded.data(), coded.size()) ? bytes_of(old) : nullptr;
    if (base) CHECK(!decoder.decode(coded.data(), coded.size(), n, count, log, nullptr)), ++classed;
    CHECK(decoder.decode(coded.data(), coded.size(), n, count, log, base));
    decoder.each([&](uint64_t position, uint64_t step, uint64_t) { set_element(back, position, log, element(back, position, log) + step); });
    CHECK(back == now);
    CHECK(!decoder.decode(coded.data(), coded.size() - 1, n, count, log, base));
  }
  std::printf("%d were coded against what was there\n", classed);
  CHECK(classed > 10);
}

TEST(nonsense_is_refused) {
  Rng rng(seed);
  std::printf("seed %llu\n", (unsigned long long)seed);
  Encoder encoder;
  Decoder decoder;
  std::vector<Bytes> seeds, olds;
  int classed = 0;
  std::vector<std::array<uint64_t, 3>> facts;  // elements, changed, log
  for (int i = 0; i < 60; ++i) {
    const int log = i % 4;
    const bool trained = log == 1 && i % 8 == 1;
    const size_t n = trained ? 15000 + rng() % 3000 : 1 + rng() % 3000;
    const Bytes old = trained ? weights(n, rng) : noise(n << log, rng);
    const Bytes now = trained ? stepped(old, rng) : changed(old, n, log, std::array{0.01, 0.1, 0.4, 1.0}[size_t(i) / 4 % 4], i % 3, rng);
    Bytes out;
    const Classing classing{trained ? 7 : -1, i % 2 == 0};
    const Change change = encoder.encode(bytes_of(old), bytes_of(now), n, log, plain({int64_t(n)}, log), 0, classing, out);
    if (!change.changed) continue;
    seeds.push_back(out);
    olds.push_back(old);
    classed += needs_old(out.data(), out.size());
    facts.push_back({n, change.changed, uint64_t(log)});
  }
  CHECK(classed > 3);
  int decoded = 0;
  for (int i = 0; i < inputs; ++i) {
    const size_t which = rng() % seeds.size();
    Bytes coded = rng() % 50 ? seeds[which] : noise(rng() % 300, rng);
    auto [n, count, log] = facts[which];
    for (uint64_t k = rng() % 4; k-- > 0 && !coded.empty();) {
      const size_t at = rng() % 3 ? rng() % coded.size() : rng() % std::min<size_t>(coded.size(), 32);
      coded[at] = rng() % 2 ? uint8_t(rng()) : uint8_t(coded[at] ^ (1 << rng() % 8));
    }
    if (rng() % 20 == 0) coded.resize(rng() % (coded.size() + 20));
    if (rng() % 20 == 0) count = rng() % 3 ? rng() % (n + 2) : rng();
    if (rng() % 20 == 0) n = rng() % 3 ? rng() % 3000 : rng() % (2 * kMostElements);
    if (rng() % 20 == 0) log = rng() % 4;
    coded.shrink_to_fit();
    Bytes base = exactly(size_t(std::min(n, uint64_t{kMostElements})) << log);  // what it is coded against, or something else
    const Bytes& was = olds[which];
    if (rng() % 4) std::copy_n(was.begin(), std::min(was.size(), base.size()), base.begin());
    if (!decoder.decode(coded.data(), coded.size(), n, count, int(log), bytes_of(base))) continue;
    ++decoded;
    uint64_t there = 0, next = 0;
    decoder.each([&](uint64_t position, uint64_t step, uint64_t) {
      CHECK(position >= next && position < n && step != 0);
      if (log < 3) CHECK(step >> (8 << log) == 0);
      next = position + 1;
      ++there;
    });
    CHECK_EQ(there, count);
  }
  std::printf("%d inputs, %d could be decoded\n", inputs, decoded);
  CHECK(decoded > inputs / 50);
}

// An object of several regions, its patch, and the patch applied to strided boxes of random parts of the regions, on several threads.
TEST(objects_and_boxes) {
  Rng rng(seed);
  mcr::set_cores(4);
  for (int round = 0; round < 60; ++round) {
    const size_t m = 1 + rng() % 4;
    std::vector<Bytes> olds, news;
    std::vector<Region> regions;
    std::vector<std::vector<int64_t>> shapes;
    for (size_t r = 0; r < m; ++r) {
      const int log = int(rng() % 4);
      std::vector<int64_t> extents;
      const size_t d = 1 + rng() % 3;
      for (size_t k = 0; k < d; ++k) extents.push_back(int64_t(1 + rng() % (k || round % 6 ? 40 : 2000)));
      const size_t n = size_t(std::accumulate(extents.begin(), extents.end(), int64_t{1}, std::multiplies<>()));
      olds.push_back(noise(n << log, rng));
      news.push_back(changed(olds.back(), n, log, std::array{0.0, 0.02, 0.5}[rng() % 3], true, rng));
      regions.push_back({nullptr, nullptr, n, n / size_t(extents[0]), plain(extents, log), {}});
      shapes.push_back(extents);
    }
    for (size_t r = 0; r < m; ++r) regions[r].old = bytes_of(olds[r]), regions[r].now = bytes_of(news[r]);
    const Encoded encoded = encode(regions);
    Bytes payload = exactly(encoded.nbytes);
    if (encoded.nbytes) encoded.write(bytes_of(payload));
    std::vector<Part> parts;
    std::vector<Box> boxes(m);
    std::vector<const Box*> of;
    std::vector<Bytes> held(m), want(m);
    for (size_t r = 0; r < m; ++r) {  // [lo, hi) of the region, held with its dimensions in reverse
      const int log = regions[r].index.log;
      Box& box = boxes[r];
      box.log = log;
      int64_t step = 1, count = 1;
      for (int64_t e : shapes[r]) {
        const int64_t lo = int64_t(rng() % uint64_t(e)), hi = lo + 1 + int64_t(rng() % uint64_t(e - lo));
        box.dims.push_back({e, 0, lo, hi, count << log});
        count *= hi - lo;
      }
      for (size_t k = box.dims.size(); k-- > 0;) box.dims[k].step = step, step *= box.dims[k].extent;
      held[r] = exactly(size_t(count) << log), want[r] = held[r];
      std::vector<int64_t> at(box.dims.size());
      for (size_t i = 0; i < regions[r].elements; ++i) {
        size_t rest = i, to = 0;
        bool in = true;
        for (size_t k = box.dims.size(); k-- > 0;) {
          const auto& dim = box.dims[k];
          const int64_t c = int64_t(rest % size_t(dim.extent));
          rest /= size_t(dim.extent);
          in &= c >= dim.lo && c < dim.hi;
          to += size_t((c - dim.lo) * dim.stride);
        }
        if (!in) continue;
        set_element(held[r], to >> log, log, element(olds[r], i, log));
        set_element(want[r], to >> log, log, element(news[r], i, log));
      }
      box.at = bytes_of(held[r]);
      box.simplify();
    }
    for (const Segment& s : encoded.segments) {
      parts.push_back({payload.data() + s.offset, s});
      of.push_back(&boxes[s.region]);
    }
    CHECK(damaged(parts).empty());
    const std::vector<Bytes> before = held;
    const auto would = apply(parts, of, Mode::kCheck);
    CHECK(held == before);
    const auto did = apply(parts, of, Mode::kApply);
    CHECK(held == want);
    for (size_t i = 0; i < parts.size(); ++i) {
      CHECK(did[i].what == Outcome::kDone && would[i].what == Outcome::kDone);
      CHECK_EQ(did[i].change.digest, would[i].change.digest);
      CHECK_EQ(did[i].change.changed, would[i].change.changed);
    }
    apply(parts, of, Mode::kRevert);
    CHECK(held == before);
    if (parts.empty()) continue;
    // There and back again is nothing.
    std::swap(olds, news);
    for (size_t r = 0; r < m; ++r) regions[r].old = bytes_of(olds[r]), regions[r].now = bytes_of(news[r]);
    const Encoded back = encode(regions);
    Bytes returns = exactly(back.nbytes);
    back.write(bytes_of(returns));
    std::vector<Chain> chains;
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part second{returns.data() + back.segments[i].offset, back.segments[i]};
      chains.push_back({{parts[i], second}, nullptr, regions[second.segment.region].index.log, {}});
    }
    std::vector<size_t> bad;
    CHECK(merge(chains, bad).segments.empty());
    CHECK(bad.empty());
    const size_t broken = rng() % parts.size();
    payload[parts[broken].segment.offset + rng() % parts[broken].segment.nbytes] ^= 4;
    CHECK(damaged(parts) == std::vector<size_t>{broken});
  }
  mcr::set_cores(0);
}

TEST(digests_of_many_elements_on_several_threads) {
  Rng rng(seed);
  mcr::set_cores(4);
  const size_t rows = 1500, columns = 1900;
  Bytes data = noise(rows * columns * 2, rng);
  Box box = plain({int64_t(rows), int64_t(columns)}, 1);
  box.at = bytes_of(data);
  uint64_t sum = 0;
  for (size_t i = 0; i < rows * columns; ++i) sum += term(element(data, i, 1), i);
  CHECK_EQ(digests({box})[0], sum);
  std::vector<Box> parts;
  for (auto [lo, hi] : {std::pair<int64_t, int64_t>{0, 7}, {7, 1000}, {1000, 1000}, {1000, 1900}}) {
    Box part;
    part.log = 1;
    part.dims = {{int64_t(rows), int64_t(columns), 0, int64_t(rows), int64_t(columns) * 2}, {int64_t(columns), 1, lo, hi, 2}};
    part.at = bytes_of(data) + lo * 2;
    parts.push_back(part);
  }
  const std::vector<uint64_t> sums = digests(parts);
  CHECK_EQ(sums[2], uint64_t{0});
  CHECK_EQ(std::accumulate(sums.begin(), sums.end(), uint64_t{0}), sum);
  mcr::set_cores(0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) inputs = std::atoi(argv[1]);
  if (argc > 2) seed = std::strtoull(argv[2], nullptr, 10);
  return check::run();
}
