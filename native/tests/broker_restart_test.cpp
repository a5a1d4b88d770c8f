// A broker that is killed and the one after it: what was spilled, who comes back, what is lost.
#include <sys/mman.h>

#include <filesystem>
#include <set>

#include "broker_support.h"
#include "temporary.h"

namespace {

constexpr uint64_t kCapacity = 16 * kMiB;

// name, spill directory, linger, first wait
ROLE(broker) {
  BrokerConfig c = harness::config(args[0], kCapacity, std::stod(args[2]));
  c.spill_dir = args[1];
  c.first_wait_s = std::stod(args[3]);
  c.spill_limit = 1 << 30;
  c.disk_reserve = 0;
  Broker broker(c);
  say("serving");
  broker.run();
  return 0;
}

// A pool whose broker is a process.
struct Pool {
  Temporary dir;
  const std::string name = harness::random_name(), path = dir / "pool/data-of-one";
  std::unique_ptr<Child> broker;
  explicit Pool(const char* linger = "1000000") : linger_(linger) { start(); }
  void start(const char* first_wait = "1000000") {
    broker = std::make_unique<Child>(std::vector<std::string>{"broker", name, path, linger_, first_wait});
    broker->expect("serving");
  }
  void kill() {
    broker->kill();
    CHECK_EQ(broker->wait(), -SIGKILL);
  }
  ClientPtr client(const Client* before = nullptr) { return Client::connect(name, "test", {}, before); }

 private:
  const char* linger_;
};

void wait_written(Client& c) { UNTIL(stat(c, "writing_bytes") == 0); }

std::string hex(ObjectId id) {
  std::string out;
  char two[3];
  for (size_t i = 0; i < sizeof id; ++i) std::snprintf(two, 3, "%02x", reinterpret_cast<const unsigned char*>(&id)[i]), out += two;
  return out;
}
// What survives the broker.
bool is_on_disk(const std::string& rows, ObjectId id) {
  const size_t at = rows.find("{\"id\":\"" + hex(id));
  CHECK(at != std::string::npos);
  const std::string row = rows.substr(at, rows.find("\"age_s\"", at) - at);
  return row.find("\"state\":\"spilled\"") != std::string::npos || row.find("\"clean\":true") != std::string::npos;
}

Status status_of(Client& c, ObjectId id) {
  View v;
  return c.get(id, 0, false, &v);
}

// Objects, more than there is room for; and which of them are on disk.
struct Objects {
  std::vector<ObjectId> all;
  std::set<ObjectId> saved;
  static size_t size(ObjectId id) { return kMiB - id.lo * 100; }
  Objects(Client& c, int count) {
    for (int i = 0; i < count; ++i) all.push_back(put(c, size({c.session(), c.new_id().lo + 1})));
    wait_written(c);
    const std::string rows = c.inspect();
    for (ObjectId id : all)
      if (is_on_disk(rows, id)) saved.insert(id);
    CHECK(!saved.empty() && saved.size() < all.size());
  }
  void check_after_restart(Client& c) const {
    for (ObjectId id : all) {
      if (saved.contains(id)) CHECK(intact(get(c, id), id, size(id)));
      else CHECK_EQ(status_of(c, id), Status::kLost);
    }
  }
};

TEST(what_was_spilled_outlives_the_broker_bit_for_bit) {
  Pool p;
  ClientPtr c = p.client(), other = p.client();
  const Objects objects(*c, 24);
  const ObjectId small = c->new_id();
  CHECK_EQ(c->put_inline(small, "x", 1, self(small), false), Status::kOk);
  std::byte* lease;
  CHECK_EQ(c->create(c->new_id(), 1000, -1, &lease).status, Status::kOk);
  View shared = get(*other, objects.all.back()), own = get(*other, objects.all.back(), true);
  std::vector<uint8_t> pool(c->pool_id(), c->pool_id() + 16);
  p.kill();
  CHECK(throws_gone([&] { c->stats(); }));
  p.start();

  ClientPtr again = p.client(c.get());
  CHECK_EQ(again->session(), c->session());
  CHECK(!std::memcmp(pool.data(), again->pool_id(), 16));
  CHECK_EQ(stat(*again, "generation"), 1u);
  CHECK_EQ(stat(*again, "leases"), 0u);
  objects.check_after_restart(*again);
  CHECK_EQ(status_of(*again, small), Status::kLost);
  CHECK(intact(shared, objects.all.back(), Objects::size(objects.all.back())));  // of the dead broker's memory
  CHECK(intact(own, objects.all.back(), Objects::size(objects.all.back())));
  lease[0] = std::byte{1};
  CHECK(throws_gone([&] { c->stats(); }));  // the old client does not take the new broker for its own
  shared.reset(), own.reset();

  const ObjectId fresh = again->new_id();
  CHECK(fresh.hi == c->session() && fresh.lo > small.lo);
  CHECK_EQ(status_of(*again, {fresh.hi, fresh.lo + 1000}), Status::kMissing);
  // And it works like any other.
  const Objects more(*again, 24);
  for (ObjectId id : objects.saved) CHECK(intact(get(*again, id), id, Objects::size(id)));
  for (ObjectId id : more.all) CHECK(intact(get(*again, id), id, Objects::size(id)));
  for (ObjectId id : objects.saved) again->unclaim(self(id));
  again->remove(more.all);
  UNTIL(stat(*again, "objects") == 0);
  UNTIL(stat(*again, "used_bytes") == 0 && stat(*again, "disk_bytes") == 0);
  CHECK_EQ(status_of(*again, *objects.saved.begin()), Status::kLost);
  CHECK_EQ(status_of(*again, more.all[0]), Status::kMissing);
}

TEST(a_second_kill_is_survived_like_the_first) {
  Pool p;
  ClientPtr c = p.client();
  const Objects first(*c, 20);
  p.kill(), p.start();
  ClientPtr second = p.client(c.get());
  for (ObjectId id : first.saved) CHECK(intact(get(*second, id), id, Objects::size(id)));
  const Objects later(*second, 24);
  p.kill(), p.start();
  ClientPtr third = p.client(second.get());
  CHECK_EQ(third->session(), c->session());
  CHECK_EQ(stat(*third, "generation"), 2u);
  first.check_after_restart(*third);
  later.check_after_restart(*third);
  CHECK_EQ(status_of(*third, {c->session(), 1'000'000}), Status::kMissing);
}

TEST(whoever_does_not_come_back_keeps_its_objects_until_it_dies) {
  Pool p;
  ClientPtr c = p.client();
  const Objects objects(*c, 20);
  p.kill(), p.start();
  ClientPtr stranger = p.client();  // of the same process, and says nothing of the session before
  CHECK(stranger->session() != c->session());
  for (ObjectId id : objects.saved) CHECK(intact(get(*stranger, id), id, Objects::size(id)));
  ClientPtr again = p.client(c.get());
  CHECK_EQ(again->session(), c->session());
  ClientPtr twice = p.client(c.get());
  CHECK(twice->session() != c->session());
  again->close();
  UNTIL(stat(*stranger, "objects") == 0);
}

ROLE(owner) {
  ClientPtr c = Client::connect(args[0], "owner");
  const Objects objects(*c, 20);
  const ObjectId one = *objects.saved.begin();
  say(std::to_string(one.hi) + " " + std::to_string(one.lo));
  wait_for_go();
  return 0;
}

TEST(an_owner_that_dies_without_a_broker_or_before_it_is_back_loses_its_objects) {
  for (bool before : {true, false}) {
    check::context = before ? "before the restart" : "after the restart";
    Pool p;
    ClientPtr c = p.client();
    Child owner({"owner", p.name});
    const std::string line = owner.line();
    const ObjectId theirs{std::stoull(line), std::stoull(line.substr(line.find(' ')))};
    CHECK(intact(get(*c, theirs), theirs, Objects::size(theirs)));
    const Objects mine(*c, 20);
    p.kill();
    if (before) owner.kill(), owner.wait();
    p.start();
    ClientPtr again = p.client(c.get());
    if (!before) {
      CHECK(intact(get(*again, theirs), theirs, Objects::size(theirs)));
      owner.kill(), owner.wait();
    }
    UNTIL(stat(*again, "objects") == mine.saved.size());
    CHECK_EQ(status_of(*again, theirs), Status::kLost);
    for (ObjectId id : mine.saved) CHECK(intact(get(*again, id), id, Objects::size(id)));
  }
}

ROLE(resumer) {
  ClientPtr c = Client::connect(args[0], "resumer");
  const Objects objects(*c, 20);
  say("ready");
  wait_for_go();
  if (const pid_t child = ::fork(); child == 0) {
    ClientPtr own = Client::connect(args[0], "child", {}, c.get());
    ::_exit(own->session() != c->session() ? 0 : 1);
  } else {
    int status;
    ::waitpid(child, &status, 0);
    CHECK_EQ(WEXITSTATUS(status), 0);
  }
  // Nor by somebody else who knows the number.
  say(std::to_string(c->session()));
  wait_for_go();
  ClientPtr again = Client::connect(args[0], "resumer", {}, c.get());
  CHECK_EQ(again->session(), c->session());
  objects.check_after_restart(*again);
  return 0;
}

TEST(a_session_is_resumed_by_its_own_process_only) {
  Pool p;
  Child resumer({"resumer", p.name});
  resumer.expect("ready");
  p.kill(), p.start();
  resumer.go();
  const SessionId session = std::stoull(resumer.line());
  Wire thief(p.name);
  CHECK(!thief.send(request(Op::kHello, {session, 1}, kProtocolVersion)));
  const Reply r = thief.receive();
  CHECK_EQ(r.status, 0);
  CHECK(r.aux != session);
  Wire attached(p.name);  // nor can its sockets be joined while it is away
  CHECK_EQ(attached.ask(request(Op::kAttach, {session, 0})), Status::kBad);
  resumer.go();
  CHECK_EQ(resumer.wait(), 0);
}

TEST(owners_are_asked_about_what_they_told_the_dead_broker) {
  Pool p;
  ClientPtr c = p.client();
  std::vector<ObjectId> ids;
  auto key = [](uint64_t n) { return key_of(ClaimKind::kToken, {7, n}); };
  for (uint64_t i = 0; i < 24; ++i) {
    const ObjectId id = c->new_id();
    std::byte* where;
    CHECK_EQ(c->create(id, kMiB, -1, &where).status, Status::kOk);
    fill(where, id, kMiB);
    CHECK_EQ(c->seal(id, key(i), false, {}), Status::kOk);
    ids.push_back(id);
  }
  wait_written(*c);
  p.kill();
  c->unclaim(key(0));  // goes nowhere
  p.start();
  ClientPtr again = p.client(c.get());
  const uint64_t there = stat(*again, "objects");
  CHECK(there > 2);
  again->listen();
  ClaimKey asked;
  for (uint64_t i = 0; i < there; ++i) {
    UNTIL(again->next_event(100, &asked));
    if (asked == key(0)) again->disown(asked, true);
    else again->adopt(asked);
  }
  CHECK(!again->next_event(0, &asked));
  UNTIL(stat(*again, "objects") == there - 1);
  CHECK_EQ(status_of(*again, ids[0]), Status::kLost);
  CHECK(intact(get(*again, ids[1]), ids[1], kMiB));
}

TEST(a_restart_with_nothing_on_disk_is_a_fresh_start) {
  Pool p;
  ClientPtr c = p.client();
  const ObjectId id = put(*c, kMiB);
  p.kill(), p.start();
  ClientPtr again = p.client(c.get());
  CHECK(again->session() != c->session());
  CHECK(std::memcmp(again->pool_id(), c->pool_id(), 16) != 0);
  CHECK_EQ(status_of(*again, id), Status::kMissing);
  CHECK_EQ(stat(*again, "generation"), 0u);
}

TEST(a_spoilt_journal_costs_what_was_spilled_and_no_more) {
  Pool p;
  ClientPtr c = p.client();
  const Objects objects(*c, 20);
  p.kill();
  std::filesystem::resize_file(p.path + "/journal", 10);
  p.start();
  ClientPtr again = p.client(c.get());
  for (ObjectId id : objects.all) CHECK(status_of(*again, id) == Status::kMissing);
  const Objects more(*again, 20);
  for (ObjectId id : more.all) CHECK(intact(get(*again, id), id, Objects::size(id)));
}

// Half of the file is beyond what comes back: it is not kept.
TEST(the_next_broker_keeps_no_more_of_the_disk_than_it_needs) {
  Pool p;
  ClientPtr c = p.client();
  const Objects objects(*c, 30);
  p.kill();
  CHECK(!::truncate((p.path + "/data").c_str(), 500 * kMiB));
  p.start();
  CHECK(std::filesystem::file_size(p.path + "/data") < 40 * kMiB);
  objects.check_after_restart(*p.client(c.get()));
}

TEST(the_directory_is_gone_after_the_last_client) {
  Pool p("0.01");
  ClientPtr c = p.client();
  const Objects objects(*c, 20);
  CHECK(std::filesystem::exists(p.path + "/journal"));
  p.kill();
  CHECK(std::filesystem::exists(p.path + "/data"));
  p.start();
  ClientPtr again = p.client(c.get());
  objects.check_after_restart(*again);
  again->close();
  CHECK_EQ(p.broker->wait(), 0);
  CHECK(!std::filesystem::exists(p.path) && !std::filesystem::exists(p.dir / "pool"));
}

// Those it has objects of live, and do not come: they may with another.
TEST(a_broker_that_nobody_comes_back_to_leaves_its_directory) {
  Pool p;
  ClientPtr c = p.client();
  const Objects objects(*c, 20);
  p.kill();
  p.start("0.01");
  CHECK_EQ(p.broker->wait(), 0);
  p.start();
  ClientPtr again = p.client(c.get());
  CHECK_EQ(stat(*again, "generation"), 2u);
  objects.check_after_restart(*again);
}

TEST(a_spill_file_that_lost_its_end_is_damaged) {
  Pool p;
  ClientPtr c = p.client();
  const Objects objects(*c, 20);
  p.kill();
  CHECK(!::truncate((p.path + "/data").c_str(), kMiB + kMiB / 2));
  p.start();
  ClientPtr again = p.client(c.get());
  int intact_ones = 0;
  for (ObjectId id : objects.saved) {
    View v;
    const Status st = again->get(id, -1, false, &v);
    if (st == Status::kOk) CHECK(intact(v, id, Objects::size(id))), ++intact_ones;
    else CHECK_EQ(st, Status::kDamaged);
  }
  CHECK_EQ(intact_ones, 1);
}

// A broker that dies while a client reads the spill file on its own: another may have used the place again.
TEST(bytes_from_the_disk_are_of_a_broker_that_lives) {
  const std::string name = harness::random_name();
  for (bool lives : {true, false}) {
    Fd listener = listen_abstract(name), file(::memfd_create("spill", MFD_CLOEXEC));
    const std::string page(kPageSize, 'x');
    CHECK_EQ(::pwrite(file.get(), page.data(), page.size(), 0), ssize_t(kPageSize));
    std::thread fake([&] {
      auto accepted = [&] {
        Fd fd;
        UNTIL((fd.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)), fd));
        return fd;
      };
      std::vector<char> buf(kMaxMessage);
      Fd post = accepted();
      CHECK(recv_message(post.get(), buf.data(), buf.size()) > 0);
      Reply r;
      r.count = 16;
      CHECK(!send_message(post.get(), &r, sizeof r, "0123456789abcdef", 16));
      Fd calls = accepted();
      CHECK(recv_message(calls.get(), buf.data(), buf.size()) > 0);
      r = {};
      CHECK(!send_message(calls.get(), &r, sizeof r));
      CHECK(recv_message(calls.get(), buf.data(), buf.size()) > 0);
      if (!lives) post.reset();
      r.status = uint16_t(Status::kOnDisk);
      r.size = 100;
      const int one[] = {file.get()};
      CHECK(!send_message(calls.get(), &r, sizeof r, nullptr, 0, one));
      CHECK_EQ(recv_message(calls.get(), buf.data(), buf.size()), 0);  // until the client is gone
    });
    ClientPtr c = Client::connect(name, "x");
    View v;
    if (lives) {
      CHECK_EQ(c->get({1, 1}, -1, false, &v), Status::kOk);
      CHECK(v.size() == 100 && v.data()[99] == std::byte{'x'});
    } else {
      CHECK(throws_gone([&] { c->get({1, 1}, -1, false, &v); }));
    }
    v.reset();
    c.reset();
    fake.join();
  }
}

TEST(a_client_of_another_version_is_told_both) {
  const std::string name = harness::random_name();
  Fd listener = listen_abstract(name);
  std::thread newer([&] {
    Fd fd;
    UNTIL((fd.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)), fd));
    std::vector<char> buf(kMaxMessage);
    CHECK(recv_message(fd.get(), buf.data(), buf.size()) > 0);
    Request q;
    std::memcpy(&q, buf.data(), sizeof q);
    Reply r;
    const std::string text = "this broker speaks protocol version 99, the client " + std::to_string(q.size);
    r.status = uint16_t(Status::kBad);
    r.count = uint32_t(text.size());
    CHECK(!send_message(fd.get(), &r, sizeof r, text.data(), text.size()));
  });
  std::string why;
  try {
    Client::connect(name, "x");
  } catch (const BrokerForeign& e) {
    why = e.what();
  }
  newer.join();
  CHECK(why == "this broker speaks protocol version 99, the client " + std::to_string(kProtocolVersion));
  BrokerThread b(kMiB);
  Wire old(b.name);
  CHECK_EQ(old.ask(request(Op::kHello, {}, 1), &why), Status::kBad);
  CHECK(why == "this broker speaks protocol version " + std::to_string(kProtocolVersion) + ", the client 1");
}

}  // namespace

int main(int argc, char** argv) { return harness::main(argc, argv); }
