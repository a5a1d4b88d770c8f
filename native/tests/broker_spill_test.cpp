// Broker and clients where memory is short: the disk, several arenas, quotas, huge pages, NUMA nodes.
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <random>

#include "broker_support.h"
#include "temporary.h"

namespace {

constexpr uint64_t kCapacity = 16 * kMiB;

BrokerConfig spilling(const std::string& path, uint64_t capacity = kCapacity) {
  BrokerConfig c = harness::config(harness::random_name(), capacity);
  c.spill_dir = path;
  c.spill_limit = 1 << 30;
  c.disk_reserve = 0;
  return c;
}

void expect_in(const std::string& where, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts)
    if (where.find(part) == std::string::npos) check::fail(__FILE__, __LINE__, "no '" + part + "' in: " + where);
}
// The text of a create that finds no room.
std::string why_full(Client& c, uint64_t bytes, int64_t timeout_ns, Status expected = Status::kFull) {
  std::byte* where;
  const auto a = c.create(c.new_id(), bytes, timeout_ns, &where);
  CHECK_EQ(a.status, expected);
  return a.text;
}
// Waits for a create, which is parked.
void send_create(Wire& w, ObjectId id, uint64_t bytes) {
  CHECK(!w.send(request(Op::kCreate, id, bytes, -1)));
  UNTIL(w.taken());
}
// Says hello as one of a group.
void join(Wire& w, const std::string& group) { w.hello(std::string("raw") + '\0' + group); }

// ---- the disk

// Puts and gets, in a working set four times the pool's size together with the others'.
ROLE(worker) {
  std::mt19937_64 rng(std::stoull(args[1]));
  ClientPtr c = Client::connect(args[0], "worker");
  std::vector<std::pair<ObjectId, size_t>> mine;
  size_t bytes = 0;
  const size_t share = std::stoull(args[2]);
  for (int i = 0; i < std::stoi(args[3]); ++i) {
    const size_t n = rng() % (rng() % 4 ? 200'000 : kMiB);
    mine.emplace_back(put(*c, n), n);
    for (bytes += n; bytes > share; mine.erase(mine.begin())) {
      bytes -= mine.front().second;
      c->remove({mine.front().first});
    }
    const auto [id, size] = mine[rng() % mine.size()];
    CHECK(intact(get(*c, id, rng() % 3 == 0), id, size));
  }
  for (auto [id, n] : mine) CHECK(intact(get(*c, id), id, n));
  for (auto [id, n] : mine) c->remove({id});
  return 0;
}

TEST(a_pool_of_a_quarter_of_the_working_set) {
  Temporary dir;
  BrokerThread b(spilling(dir / "pool/one"));
  ClientPtr c = b.client();
  std::vector<std::unique_ptr<Child>> workers;
  for (int i = 0; i < 4; ++i)
    workers.push_back(std::make_unique<Child>(
        std::vector<std::string>{"worker", b.name, std::to_string(i), std::to_string(kCapacity), "250"}));
  for (auto& w : workers) CHECK_EQ(w->wait(), 0);
  CHECK(stat(*c, "spill_written_bytes") > kCapacity);
  CHECK(stat(*c, "spill_read_bytes") + stat(*c, "served_from_disk") > 0);
  expect_empty(*c);
  UNTIL(stat(*c, "disk_bytes") == 0);
  CHECK_EQ(stat(*c, "writing_bytes") + stat(*c, "clean_bytes") + stat(*c, "orphans_dropped"), 0u);
}

TEST(a_waiting_create_is_served_by_spilling) {
  Temporary dir;
  BrokerThread b(spilling(dir / "pool/one"));
  ClientPtr c = b.client();
  wait_populated(*c);
  const ObjectId a = put(*c, 6 * kMiB), d = put(*c, 6 * kMiB);  // below the high mark
  std::byte* where;
  CHECK_EQ(c->create(c->new_id(), 8 * kMiB, -1, &where).status, Status::kOk);
  CHECK(stat(*c, "disk_bytes") > 0);
  for (ObjectId id : {a, d}) CHECK(intact(get(*c, id), id, 6 * kMiB));
}

TEST(gets_do_not_wait_for_room) {
  Temporary dir;
  BrokerThread b(spilling(dir / "pool/one"));
  ClientPtr c = b.client();
  wait_populated(*c);
  const ObjectId id = put(*c, 6 * kMiB + 5);
  std::byte* where;
  // Leases: all there is but for a rest, and nobody gives it back.
  CHECK_EQ(c->create(c->new_id(), 9 * kMiB, -1, &where).status, Status::kOk);
  CHECK_EQ(c->create(c->new_id(), 6 * kMiB, -1, &where).status, Status::kOk);
  Wire waiting(b.name);
  waiting.hello();
  send_create(waiting, {waiting.session, 1}, kMiB);
  for (bool writable : {false, true}) {
    View v = get(*c, id, writable);
    CHECK(intact(v, id, 6 * kMiB + 5) && v.writable());
    CHECK_EQ(uint64_t(uintptr_t(v.data())) % kPageSize, 0u);
    UNTIL(stat(*c, "pins") == 0);  // a copy of its own pins nothing
  }
  CHECK_EQ(stat(*c, "served_from_disk"), 2u);
  CHECK(!waiting.readable());
}

TEST(gets_go_on_during_heavy_creates) {
  Temporary dir;
  BrokerThread b(spilling(dir / "pool/one"));
  ClientPtr c = b.client();
  std::vector<ObjectId> ids;
  for (int i = 0; i < 40; ++i) ids.push_back(put(*c, kMiB));
  std::atomic<bool> stop{false};
  std::vector<std::thread> makers;
  for (int i = 0; i < 3; ++i)
    makers.emplace_back([&] {
      ClientPtr m = b.client("maker");
      std::vector<ObjectId> mine;
      while (!stop) {
        std::byte* where;
        mine.push_back(m->new_id());
        CHECK_EQ(m->create(mine.back(), 3 * kMiB, -1, &where).status, Status::kOk);
        where[0] = std::byte{1};
        CHECK_EQ(m->seal(mine.back(), self(mine.back()), false, {}), Status::kOk);
        if (mine.size() > 4) m->remove({mine.front()}), mine.erase(mine.begin());
      }
    });
  for (int round = 0; round < 2; ++round)
    for (ObjectId id : ids) CHECK(intact(get(*c, id), id, kMiB));
  stop = true;
  for (auto& m : makers) m.join();
}

TEST(what_is_removed_leaves_the_disk) {
  Temporary dir;
  BrokerThread b(spilling(dir / "pool/one"));
  ClientPtr c = b.client();
  std::vector<ObjectId> ids;
  for (int i = 0; i < 40; ++i) ids.push_back(put(*c, kMiB));
  auto blocks = [&] {
    struct stat st;
    CHECK(!::stat((dir / "pool/one/data").c_str(), &st));
    return uint64_t(st.st_blocks) * 512;
  };
  UNTIL(stat(*c, "writing_bytes") == 0 && blocks() >= 20 * kMiB);
  c->remove(ids);
  UNTIL(stat(*c, "disk_bytes") == 0);
  UNTIL(blocks() == 0);
}

TEST(an_unusable_directory_is_named_and_the_pool_works_without) {
  for (const char* how : {"file", "parent", "open to others"}) {
    check::context = how;
    Temporary dir;
    std::string path = dir / "pool/one", named = path;
    if (*how == 'f') std::filesystem::create_directory(dir / "pool"), std::ofstream(path) << "mine";
    if (*how == 'p') std::ofstream(named = dir / "pool") << "mine";
    if (*how == 'o') CHECK(!::mkdir((named = dir / "pool").c_str(), 0700) && !::chmod(named.c_str(), 0777));
    BrokerThread b(spilling(path));
    ClientPtr c = b.client();
    wait_populated(*c);
    std::vector<ObjectId> ids;
    for (int i = 0; i < 16; ++i) ids.push_back(put(*c, kMiB));
    expect_in(why_full(*c, kMiB, kSecond / 100), {"nothing can be spilled: ", named, "0 B on disk"});
    for (ObjectId id : ids) CHECK(intact(get(*c, id), id, kMiB));
    c->remove({ids[0]});
    put(*c, kMiB);
    CHECK(check::number(c->stats(), "disk_bytes") == 0);
  }
}

// As somebody who is not root: a directory without permission bits.
ROLE(unprivileged) {
  if (!::geteuid()) CHECK(!::setgid(65534) && !::setuid(65534));
  for (const char* what : {"parent", "pool"}) {
    Temporary dir;
    const std::string parent = dir / "parent", path = parent + "/pool";
    std::filesystem::create_directories(path);
    CHECK(!::chmod(parent.c_str(), 0700));
    CHECK(!::chmod((std::string(what) == "parent" ? parent : path).c_str(), 0));
    {
      BrokerThread b(spilling(path));
      ClientPtr c = b.client();
      wait_populated(*c);
      for (int i = 0; i < 16; ++i) put(*c, kMiB);
      expect_in(why_full(*c, kMiB, kSecond / 100), {"nothing can be spilled: ", path, "Permission denied"});
    }
    CHECK(!::chmod(parent.c_str(), 0700) && !::chmod(path.c_str(), 0700));
  }
  return 0;
}
TEST(a_directory_without_permission_bits) { CHECK_EQ(Child({"unprivileged"}).wait(), 0); }

TEST(a_full_disk_costs_nothing_and_is_tried_again) {
  Temporary dir;
  if (!dir.mount(24 * kMiB)) return;
  const std::string filler = dir / "filler";
  std::ofstream(filler, std::ios::binary) << std::string(16 * kMiB, 'x');
  BrokerThread b(spilling(dir / "pool/one"));
  ClientPtr c = b.client();
  wait_populated(*c);
  std::vector<ObjectId> ids;
  std::byte* where;
  for (;;) {
    const ObjectId id = c->new_id();
    const auto a = c->create(id, kMiB, kSecond / 2, &where);
    if (a.status == Status::kFull) {
      expect_in(a.text, {"nothing can be spilled: write: ", dir / "pool/one/data", "MiB on disk"});
      break;
    }
    CHECK_EQ(a.status, Status::kOk);
    fill(where, id, kMiB);
    CHECK_EQ(c->seal(id, self(id), false, {}), Status::kOk);
    ids.push_back(id);
    CHECK(ids.size() < 40);
  }
  CHECK(ids.size() >= 16);
  for (ObjectId id : ids) CHECK(intact(get(*c, id), id, kMiB));
  std::filesystem::remove(filler);
  for (int i = 0; i < 6; ++i) ids.push_back(put(*c, kMiB));  // waits for the disk to be tried again
  CHECK(stat(*c, "disk_bytes") > 0);
  for (ObjectId id : ids) CHECK(intact(get(*c, id), id, kMiB));
}

TEST(the_reports_row_an_object_is_of_any_length) {
  Temporary dir;
  BrokerThread b(spilling(dir / "pool/one"));
  ClientPtr c = b.client("teller");
  for (int i = 0; i < 1000; ++i) {
    const ObjectId id = c->new_id();
    std::byte* where;
    CHECK_EQ(c->create(id, 100, -1, &where, "train.py:" + std::to_string(i)).status, Status::kOk);
    CHECK_EQ(c->seal(id, self(id), false, {}), Status::kOk);
  }
  put(*c, 10);
  const std::string all = c->inspect();
  CHECK(all.size() > kMaxMessage);
  expect_in(all, {"\"note\":\"train.py:0\"", "\"note\":\"train.py:999\"", "\"creator_label\":\"teller\"", "\"state\":\"resident\"", "\"owned_bytes\":"});
  CHECK(c->stats().size() < kMaxMessage);
}

// ---- arenas

TEST(further_arenas_begin_where_the_first_ends) {
  BrokerConfig config = harness::config(harness::random_name(), kCapacity);
  config.arena = 4 * kMiB;
  BrokerThread b(config);
  ClientPtr old = b.client(), c = b.client();
  const ObjectId first = put(*old, kMiB);
  std::vector<ObjectId> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(put(*c, 3 * kMiB));
  CHECK_EQ(stat(*c, "capacity_bytes"), kCapacity);
  for (ObjectId id : ids) CHECK(intact(get(*old, id), id, 3 * kMiB) && intact(get(*old, id, true), id, 3 * kMiB));
  CHECK(intact(get(*c, first), first, kMiB));
  Wire w(b.name);
  w.hello();
  for (uint64_t i = 0; i < 4; ++i) {
    std::vector<Fd> fds;
    CHECK(!w.send(request(Op::kArena, {}, i)));
    const Reply r = w.receive(nullptr, &fds);
    CHECK(r.status == 0 && r.size == 4 * kMiB && r.arena == i && fds.size() == 2);
  }
  for (uint64_t i : {uint64_t(4), UINT64_MAX}) CHECK_EQ(w.ask(request(Op::kArena, {}, i)), Status::kMissing);
  old->remove({first}), c->remove(ids);
  expect_empty(*c);
}

TEST(an_object_larger_than_an_arena_has_one_of_its_own) {
  BrokerConfig config = harness::config(harness::random_name(), kCapacity);
  config.arena = 4 * kMiB;
  config.prefault = kMiB;
  BrokerThread b(config);
  ClientPtr c = b.client();
  const ObjectId id = put(*c, 9 * kMiB);
  CHECK(intact(get(*c, id), id, 9 * kMiB));
  UNTIL(stat(*c, "populated_bytes") >= 13 * kMiB);
  // What no arena can hold any more does not wait, whatever is freed.
  c->remove({id});
  expect_in(why_full(*c, 9 * kMiB + 1, -1, Status::kTooLarge), {"no arena has more than " + std::to_string(9 * kMiB)});
  CHECK(intact(get(*c, put(*c, 9 * kMiB)), {c->session(), 3}, 9 * kMiB));
}

TEST(a_pool_grows_on_request_up_to_what_it_was_allowed) {
  BrokerConfig config = harness::config(harness::random_name(), kCapacity);
  config.most = 40 * kMiB;
  BrokerThread b(config);
  ClientPtr c = b.client();
  const ObjectId first = put(*c, 16 * kMiB);
  Wire waiting(b.name);
  waiting.hello();
  send_create(waiting, {waiting.session, 1}, 10 * kMiB);
  CHECK(!waiting.readable());
  const auto refused = c->grow(40 * kMiB + 1);
  CHECK_EQ(refused.status, Status::kTooLarge);
  expect_in(refused.text, {std::to_string(40 * kMiB)});
  CHECK_EQ(c->grow(30 * kMiB).status, Status::kOk);
  CHECK_EQ(waiting.receive().status, 0);
  CHECK_EQ(c->grow(0).status, Status::kOk);  // never less
  CHECK_EQ(stat(*c, "capacity_bytes"), 30 * kMiB);
  CHECK(intact(get(*c, first), first, 16 * kMiB));
  CHECK_EQ(c->grow(40 * kMiB).status, Status::kOk);
  const ObjectId more = put(*c, 10 * kMiB);
  CHECK(intact(get(*c, more), more, 10 * kMiB));
  BrokerThread fixed(4 * kMiB);
  CHECK_EQ(fixed.client()->grow(4 * kMiB).status, Status::kOk);
  CHECK_EQ(fixed.client()->grow(4 * kMiB + 1).status, Status::kTooLarge);
}

TEST(memory_of_two_places) {
  BrokerConfig config = harness::config(harness::random_name(), kCapacity);
  config.nodes = {0, -1};
  std::unique_ptr<BrokerThread> b;
  try {
    b = std::make_unique<BrokerThread>(config);
  } catch (const std::system_error& e) {
    std::printf("  skipped: no memory can be bound to node 0 here: %s\n", e.what());
    return;
  }
  ClientPtr c = b->client();
  std::vector<ObjectId> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(put(*c, 3 * kMiB));  // this process runs on node 0: two fit there
  const std::string stats = c->stats();
  expect_in(stats, {"\"numa_node\":0", "\"numa_node\":-1"});
  for (ObjectId id : ids) CHECK(intact(get(*c, id), id, 3 * kMiB));
  c->remove(ids);
  expect_empty(*c);
  Wire w(b->name);
  w.hello();
  for (uint64_t place : {0, 1}) {  // node + 1; 0: not known
    Request q = request(Op::kCreate, {w.session, 1 + place}, kMiB, -1);
    q.key.kind = uint32_t(place);
    CHECK(!w.send(q));
    CHECK_EQ(w.receive().arena, place ? 0u : 1u);
  }
}

// ---- quotas

TEST(a_group_at_its_quota_does_not_hold_up_another) {
  BrokerConfig config = harness::config(harness::random_name(), kCapacity);
  config.quota = 4 * kMiB;
  BrokerThread b(config);
  ClientPtr c = b.client(), a = Client::connect(b.name, "a", "one"), o = Client::connect(b.name, "o", "two");
  wait_populated(*c);
  const ObjectId big = put(*a, 3 * kMiB);
  expect_in(why_full(*a, 4 * kMiB + 1, -1, Status::kTooLarge), {"group one has 3.0 MiB of its quota"});
  Wire first(b.name), second(b.name);
  join(first, "one"), join(second, "one");
  send_create(first, {first.session, 1}, 2 * kMiB);
  send_create(second, {second.session, 1}, 1);  // would fit, and is of the same group: waits its turn
  const ObjectId theirs = put(*o, 4 * kMiB);    // came later, of another group
  CHECK(!first.readable() && !second.readable());
  expect_in(why_full(*o, 1, kSecond / 100), {"group two has 4.0 MiB of its quota of 4.0 MiB"});
  put(*c, kMiB);  // of the group without a name
  o->remove({theirs});
  CHECK(!first.readable());
  a->remove({big});
  for (Wire* w : {&first, &second}) CHECK_EQ(w->receive().status, 0);
}

TEST(a_quota_is_met_by_spilling_the_groups_own) {
  Temporary dir;
  BrokerConfig config = spilling(dir / "pool/one");
  config.quota = 4 * kMiB;
  BrokerThread b(config);
  ClientPtr a = Client::connect(b.name, "a", "one"), o = Client::connect(b.name, "o", "two");
  const ObjectId theirs = put(*o, 2 * kMiB);
  std::vector<ObjectId> ids;
  for (int i = 0; i < 20; ++i) ids.push_back(put(*a, kMiB));
  CHECK(stat(*a, "used_bytes") <= 6 * kMiB);
  CHECK_EQ(stat(*o, "served_from_disk"), 0u);
  CHECK(intact(get(*o, theirs), theirs, 2 * kMiB));
  CHECK_EQ(stat(*o, "served_from_disk") + stat(*o, "spill_read_bytes"), 0u);
  for (ObjectId id : ids) CHECK(intact(get(*o, id), id, kMiB));
}

// ---- reserved huge pages

class HugePages_ {
 public:
  static constexpr const char* kPath = "/proc/sys/vm/nr_hugepages";
  HugePages_() : before_(read()) {}
  ~HugePages_() { set(before_); }
  bool set(uint64_t n) {
    std::ofstream(kPath) << n << std::flush;
    return read() == n;
  }

 private:
  static uint64_t read() {
    uint64_t n = 0;
    std::ifstream(kPath) >> n;
    return n;
  }
  const uint64_t before_;
};

ROLE(huge) {
  BrokerConfig config = harness::config(harness::random_name(), 8 * kMiB);
  config.huge_pages = HugePages::kHugetlb;
  if (args[0] == "too few") {
    std::string why;
    try {
      Broker b(config);
    } catch (const std::system_error& e) {
      why = e.what();
    }
    expect_in(why, {"4 reserved huge pages of 2 MiB (vm.nr_hugepages)"});
    return 0;
  }
  BrokerThread b(config);
  ClientPtr writer = b.client(), reader = b.client();
  CHECK_EQ(writer->capacity(), 8 * kMiB);
  expect_in(writer->stats(), {"\"huge_pages\":\"hugetlb\""});
  const size_t n = 3 * kMiB + 77;
  const ObjectId id = put(*writer, n), other = put(*writer, 100);
  CHECK(intact(get(*reader, id), id, n));
  View one = get(*reader, id, true), two = get(*writer, id, true);
  CHECK(one.writable() && two.writable());
  UNTIL(stat(*reader, "pins") == 0);
  std::memset(const_cast<std::byte*>(one.data()), 0xEE, n);
  CHECK(intact(two, id, n) && intact(get(*reader, id), id, n));
  std::memset(const_cast<std::byte*>(two.data()), 0xDD, n);
  CHECK(one.data()[n - 1] == std::byte{0xEE});
  CHECK(intact(get(*reader, other), other, 100));
  writer->remove({id, other});
  expect_empty(*reader);
  return 0;
}

TEST(huge_pages) {
  HugePages_ pages;
  if (!pages.set(6)) {
    std::printf("  skipped: %s cannot be set here\n", HugePages_::kPath);
    return;
  }
  CHECK_EQ(Child({"huge", "enough"}).wait(), 0);
  if (pages.set(2)) CHECK_EQ(Child({"huge", "too few"}).wait(), 0);
}

}  // namespace

int main(int argc, char** argv) { return harness::main(argc, argv); }
