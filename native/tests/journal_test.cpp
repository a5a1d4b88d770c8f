// The journal: what was written is read, however its writer died.
#include "pool/journal.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "table_support.h"
#include "temporary.h"

using namespace mcr;

namespace {

const uint8_t kPool[16] = {1, 2, 3, 4};

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write_bytes(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes; }

// What a journal says, as text in a fixed order.
struct Truth {
  std::map<SessionId, std::string> sessions;
  std::map<ObjectId, std::string> objects;
  std::map<ClaimKey, std::string> claims;
  bool operator==(const Truth&) const = default;

  void put(const SavedSession& s) { sessions[s.id] = std::to_string(s.pid) + " " + std::to_string(s.born) + " " + s.label + "|" + s.group; }
  void put(const SavedObject& o) {
    objects[o.id] = std::to_string(o.creator) + " " + std::to_string(o.size) + " " + std::to_string(o.disk_page) + " " + o.group + "|" + o.note;
  }
  void put(const SavedClaim& c) {
    std::string& text = claims[c.key];
    text = std::to_string(c.owner) + " " + std::to_string(c.creator) + (c.handover ? " handover" : "") + (c.inherited ? " inherited" : "");
    for (ObjectId id : c.objects) text += " " + std::to_string(id.hi) + "/" + std::to_string(id.lo);
  }
  void forget(SessionId s) { sessions.erase(s); }
  void forget(ObjectId id) { objects.erase(id); }
  void forget(const ClaimKey& key) { claims.erase(key); }
};
Truth truth_of(const Journal::Contents& c) {
  Truth t;
  for (auto& s : c.sessions) t.put(s);
  for (auto& o : c.objects) t.put(o);
  for (auto& k : c.claims) t.put(k);
  return t;
}

struct Random {
  std::mt19937_64 rng;
  uint64_t pick(uint64_t n) { return rng() % n; }
  std::string text(uint64_t most) {
    std::string out(pick(most), '\0');
    for (char& c : out) c = char(rng());
    return out;
  }
  ObjectId id() { return {pick(3), pick(20)}; }
  SavedSession session() { return {pick(8), int32_t(rng()), rng(), text(40), text(10)}; }
  SavedObject object() { return {id(), rng(), rng(), rng(), text(10), text(kNoteMax)}; }
  SavedClaim claim() {
    SavedClaim c{token(pick(10)), rng(), rng(), bool(pick(2)), bool(pick(2)), {}};
    for (uint64_t n = pick(5); n; --n) c.objects.push_back({rng(), rng()});
    return c;
  }
  // The same to both.
  template <class... To>
  void change(To&... to) {
    switch (pick(6)) {
      case 0: return each(session(), to...);
      case 1: return each(object(), to...);
      case 2: return each(claim(), to...);
      case 3: return gone(SessionId(pick(8)), to...);
      case 4: return gone(id(), to...);
      default: return gone(token(pick(10)), to...);
    }
  }
  template <class T, class... To>
  void each(const T& what, To&... to) { (to.put(what), ...); }
  template <class T, class... To>
  void gone(const T& what, To&... to) { (to.forget(what), ...); }
};

// "" or what it throws.
std::string refusal(const std::string& path) {
  try {
    Journal::read(path);
  } catch (const std::system_error& e) {
    return "system: " + std::string(e.what());
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

TEST(random_contents_come_back_and_later_records_win) {
  Temporary dir;
  const std::string path = dir / "journal";
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    check::context = "seed " + std::to_string(seed);
    Random r{std::mt19937_64(seed)};
    Journal j(path, kPool, seed);
    Truth truth;
    for (uint64_t n = r.pick(50); n; --n) r.change(j, truth);
    j.commit();
    for (int i = 0; i < 30; ++i) {
      for (uint64_t n = r.pick(20); n; --n) r.change(j, truth);
      j.write();
      const auto c = Journal::read(path);
      CHECK(truth_of(c) == truth);
      CHECK_EQ(c.generation, seed);
      CHECK(!std::memcmp(c.pool_id, kPool, sizeof kPool));
    }
  }
}

// A journal with the truth after each record, by the length of the log.
std::map<size_t, Truth> some_log(const std::string& path, uint64_t seed) {
  Random r{std::mt19937_64(seed)};
  Journal j(path, kPool, 7);
  j.commit();
  std::map<size_t, Truth> prefixes;
  Truth truth;
  prefixes[bytes_of(path).size()] = truth;
  for (int i = 0; i < 40; ++i) {
    r.change(j, truth);
    j.write();
    prefixes[bytes_of(path).size()] = truth;
  }
  return prefixes;
}

TEST(a_log_cut_anywhere_says_what_was_true_before) {
  Temporary dir;
  const std::string path = dir / "journal", cut = dir / "cut";
  const auto prefixes = some_log(path, 1);
  const std::string all = bytes_of(path);
  const size_t header = prefixes.begin()->first;
  for (size_t n = 0; n <= all.size(); ++n) {
    check::context = std::to_string(n) + " bytes";
    write_bytes(cut, all.substr(0, n));
    if (n < header) {
      CHECK(refusal(cut).find("too short") != std::string::npos);
      continue;
    }
    const auto c = Journal::read(cut);
    CHECK(truth_of(c) == std::prev(prefixes.upper_bound(n))->second);
    CHECK_EQ(c.generation, 7u);
  }
}

TEST(a_flipped_bit_ends_the_log_where_it_is) {
  Temporary dir;
  const std::string path = dir / "journal", spoilt = dir / "spoilt";
  const auto prefixes = some_log(path, 2);
  const std::string all = bytes_of(path);
  const size_t header = prefixes.begin()->first;
  for (size_t at = 0; at < all.size(); ++at) {
    check::context = "byte " + std::to_string(at);
    std::string other = all;
    other[at] = char(other[at] ^ (1 << at % 8));
    write_bytes(spoilt, other);
    if (at < 8) {
      CHECK(refusal(spoilt).find("is not a journal of this version") != std::string::npos);
    } else if (at < header) {
      CHECK(truth_of(Journal::read(spoilt)) == prefixes.rbegin()->second);  // another pool's, or generation's
    } else {
      CHECK(truth_of(Journal::read(spoilt)) == std::prev(prefixes.upper_bound(at))->second);
    }
  }
}

TEST(what_is_no_journal_is_refused) {
  Temporary dir;
  CHECK(refusal(dir / "nothing").find("system: ") == 0);
  CHECK(refusal(dir / "nothing").find("nothing") != std::string::npos);
  write_bytes(dir / "other", std::string(100, 'x'));
  CHECK(refusal(dir / "other").find("is not a journal of this version") != std::string::npos);
  CHECK(refusal(dir / ".").find("system: ") == 0);
  bool thrown = false;
  try {
    Journal(dir / "no such directory/journal", kPool, 0);
  } catch (const std::system_error& e) {
    thrown = e.code().value() == ENOENT;
  }
  CHECK(thrown);
}

TEST(a_new_log_takes_the_old_ones_place_when_it_is_complete) {
  Temporary dir;
  const std::string path = dir / "journal";
  Random r{std::mt19937_64(3)};
  Truth before, after;
  Journal old(path, kPool, 1);
  for (int i = 0; i < 20; ++i) r.change(old, before);
  old.commit();
  {
    Journal half(path, kPool, 2);
    for (int i = 0; i < 20; ++i) r.change(half, after);
    half.write();
  }  // its writer died
  CHECK(truth_of(Journal::read(path)) == before);
  after = {};
  Journal next(path, kPool, 2);  // what is left of the half one does not get in its way
  for (int i = 0; i < 20; ++i) r.change(next, after);
  CHECK(truth_of(Journal::read(path)) == before);
  next.commit();
  CHECK(truth_of(Journal::read(path)) == after);
  r.change(next, after);
  next.write();
  CHECK(truth_of(Journal::read(path)) == after);
  CHECK_EQ(Journal::read(path).generation, 2u);
  CHECK_EQ(size_t(std::distance(std::filesystem::directory_iterator(dir / ""), {})), 1u);
}

TEST(a_log_is_overgrown_when_it_is_large_and_mostly_old) {
  Temporary dir;
  Journal small(dir / "small", kPool, 0), large(dir / "large", kPool, 0);
  const SavedSession big{1, 1, 1, std::string(1 << 20, 'x'), ""};
  for (int i = 0; i < 2; ++i) large.put(big);
  small.commit(), large.commit();
  int in_small = 0, in_large = 0;
  for (; !small.overgrown(); ++in_small) small.put(big), small.write();
  for (; !large.overgrown(); ++in_large) large.put(big), large.write();
  CHECK_EQ(in_small, 4);  // beyond 4 MiB
  CHECK_EQ(in_large, 7);  // and beyond four times what it began with
}

}  // namespace

int main() { return check::run(); }
