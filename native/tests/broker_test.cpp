// Broker and clients together: contents, maps, waiting, deaths.
#include <sys/mman.h>

#include <atomic>
#include <random>

#include "broker_support.h"

namespace {

// ---- contents

TEST(contents_round_trip) {
  BrokerThread b(32 * kMiB);
  ClientPtr writer = b.client(), reader = b.client();
  std::vector<std::pair<ObjectId, size_t>> all;
  for (size_t n : {size_t(0), size_t(1), kPageSize - 1, kPageSize, kPageSize + 1, size_t(100'003), size_t(3 * kMiB + 17)}) {
    const ObjectId id = put(*writer, n);
    for (bool writable : {false, true}) {
      const View theirs = get(*reader, id, writable), mine = get(*writer, id, writable);
      CHECK(intact(theirs, id, n) && intact(mine, id, n));
      CHECK_EQ(uint64_t(uintptr_t(theirs.data())) % kPageSize, 0u);
    }
    all.emplace_back(id, n);
  }
  for (auto [id, n] : all) CHECK(intact(get(*reader, id), id, n));
  for (auto [id, n] : all) writer->remove({id});
  UNTIL(is_missing(*reader, all[0].first));
  expect_empty(*reader);
}

TEST(small_objects_travel_inside_the_message) {
  BrokerThread b(8 * kMiB);
  ClientPtr c = b.client(), reader = b.client();
  View last;
  for (size_t n : {size_t(0), size_t(1), kInlineMax}) {
    const ObjectId id = c->new_id();
    std::vector<std::byte> bytes(n);
    fill(bytes.data(), id, n);
    CHECK_EQ(c->put_inline(id, bytes.data(), n, self(id), false), Status::kOk);
    CHECK_EQ(c->put_inline(id, bytes.data(), n, self(id), false), Status::kExists);
    last = get(*reader, id);
    CHECK(intact(last, id, n) && last.writable());
    c->unclaim(self(id));
    UNTIL(is_missing(*reader, id));
    CHECK(intact(last, id, n));
  }
  std::vector<std::byte> bytes(kInlineMax + 1);
  CHECK_EQ(c->put_inline(c->new_id(), bytes.data(), bytes.size(), self(c->new_id()), false), Status::kTooLarge);
  CHECK_EQ(stat(*reader, "pins"), 0u);
  expect_empty(*c);
}

TEST(threads_put_and_get_at_once) {
  BrokerThread b(64 * kMiB);
  ClientPtr shared = b.client();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937_64 rng(t);
      ClientPtr c = t % 2 ? b.client() : shared;
      std::vector<std::pair<ObjectId, size_t>> mine;
      for (int i = 0; i < 150; ++i) {
        const size_t n = rng() % (i % 10 ? 30'000 : 2 * kMiB);
        mine.emplace_back(put(*c, n), n);
        const auto [id, size] = mine[rng() % mine.size()];
        CHECK(intact(get(*(rng() % 2 ? c : shared), id, rng() % 2), id, size));
        if (mine.size() > 8) {
          c->remove({mine.front().first});
          mine.erase(mine.begin());
        }
      }
      for (auto [id, n] : mine) {
        CHECK(intact(get(*c, id), id, n));
        c->remove({id});
      }
    });
  for (auto& t : threads) t.join();
  expect_empty(*shared);
  CHECK_EQ(stat(*shared, "puts"), 600u);
}

TEST(batches_beyond_one_message) {
  BrokerThread b(8 * kMiB);
  ClientPtr c = b.client();
  std::vector<ObjectId> ids;
  for (size_t i = 0; i < kMaxIds + 100; ++i) {
    ids.push_back(c->new_id());
    if (i % 100 == 0) CHECK_EQ(c->put_inline(ids.back(), "x", 1, self(ids.back()), false), Status::kOk);
  }
  bool refused = false;
  try {
    c->wait(ids, 1, 0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
  CHECK_EQ(c->seal({}, self(ids[0]), false, ids), Status::kBad);
  c->remove(ids);
  expect_empty(*c);
}

// ---- maps

TEST(the_arena_is_sealed_and_its_second_descriptor_cannot_write) {
  BrokerThread b(4 * kMiB);
  Wire w(b.name);
  w.hello();
  CHECK_EQ(w.arena_bytes, 4 * kMiB);
  CHECK_EQ(::fcntl(w.rw.get(), F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  for (uint64_t bytes : {uint64_t(0), 4 * kMiB - kPageSize, 4 * kMiB + kPageSize}) CHECK(::ftruncate(w.rw.get(), off_t(bytes)) == -1 && errno == EPERM);
  CHECK(::fcntl(w.rw.get(), F_ADD_SEALS, F_SEAL_WRITE) == -1 && errno == EPERM);
  CHECK(::mmap(nullptr, kPageSize, PROT_READ | PROT_WRITE, MAP_SHARED, w.ro.get(), 0) == MAP_FAILED && errno == EACCES);
  void* ro = ::mmap(nullptr, kPageSize, PROT_READ, MAP_SHARED, w.ro.get(), 0);
  CHECK(ro != MAP_FAILED);
  CHECK(::mprotect(ro, kPageSize, PROT_READ | PROT_WRITE) == -1 && errno == EACCES);
  ::munmap(ro, kPageSize);
}

// Writes where it must not: into a shared view, or, as a forked child, into its parent's lease.
ROLE(trespasser) {
  ::signal(SIGSEGV, [](int) { ::_exit(42); });
  ClientPtr c = Client::connect(args[0], "trespasser");
  std::byte* target;
  View v;
  if (args[1] == "view") {
    v = get(*c, put(*c, 10'000));
    target = const_cast<std::byte*>(v.data());
  } else {
    CHECK_EQ(c->create(c->new_id(), 10'000, -1, &target).status, Status::kOk);
    *target = std::byte{1};
    if (const pid_t child = ::fork()) {
      int status;
      ::waitpid(child, &status, 0);
      return WEXITSTATUS(status);
    }
  }
  *reinterpret_cast<volatile std::byte*>(target) = std::byte{1};
  ::_exit(0);
}

TEST(a_shared_view_and_a_parents_lease_refuse_writes) {
  BrokerThread b(4 * kMiB);
  for (const char* what : {"view", "lease"}) CHECK_EQ(Child({"trespasser", b.name, what}).wait(), 42);
  expect_empty(*b.client());
}

TEST(a_private_view_is_its_own) {
  BrokerThread b(8 * kMiB);
  ClientPtr c = b.client();
  const size_t n = 3 * kPageSize + 5;
  const ObjectId id = put(*c, n), next = put(*c, n);
  View one = get(*c, id, true), two = get(*c, id, true), shared = get(*c, id);
  CHECK(one.writable() && !shared.writable());
  std::memset(const_cast<std::byte*>(one.data()), 0xEE, n);
  CHECK(intact(two, id, n) && intact(shared, id, n) && intact(get(*c, id), id, n) && intact(get(*c, next), next, n));
  CHECK(one.data()[n - 1] == std::byte{0xEE});
}

TEST(locate_knows_what_is_still_as_in_the_pool) {
  BrokerThread b(8 * kMiB);
  ClientPtr c = b.client();
  const size_t n = 4 * kPageSize + 100;
  const ObjectId id = put(*c, n);
  auto at = [&](const std::byte* p, size_t bytes, uint64_t offset) {
    const auto found = c->locate(p, bytes);
    return found && found->id == id && found->offset == offset;
  };
  {
    View shared = get(*c, id), again = get(*c, id), own = get(*c, id, true);
    for (const View* v : {&shared, &again, &own}) {
      CHECK(at(v->data(), n, 0) && at(v->data() + 5000, 100, 5000) && at(v->data() + n, 0, n));
      CHECK(!c->locate(v->data(), n + 1));
      CHECK(!c->locate(v->data() - 1, 2));
    }
    auto* p = const_cast<std::byte*>(own.data());
    CHECK(p[kPageSize] == pattern(id, kPageSize));  // a read does not make it differ
    CHECK(at(p, n, 0));
    *const_cast<volatile std::byte*>(p + 2 * kPageSize + 9) = pattern(id, 2 * kPageSize + 9);  // a write does, even of the same value
    CHECK(!c->locate(p, n));
    CHECK(!c->locate(p + 2 * kPageSize, 1));
    CHECK(at(p, 2 * kPageSize, 0));
    CHECK(at(p + 3 * kPageSize, kPageSize + 100, 3 * kPageSize));
    CHECK(at(shared.data(), n, 0));
    const std::byte* addresses[] = {shared.data(), own.data()};
    again.reset();
    CHECK(at(addresses[0], n, 0));  // the other view of the same memory
    shared.reset(), own.reset();
    for (const std::byte* p : addresses) CHECK(!c->locate(p, 1));
  }
  std::byte local[64];
  CHECK(!c->locate(local, sizeof local));
  CHECK(!c->locate(nullptr, 0));
}

TEST(a_view_outlives_close_and_the_broker) {
  auto b = std::make_unique<BrokerThread>(8 * kMiB);
  ClientPtr c = b->client(), other = b->client();
  const ObjectId id = put(*other, 50'000);
  View shared = get(*c, id), own = get(*c, id, true);
  c->close();
  CHECK(!c->usable());
  CHECK(throws_gone([&] { c->stats(); }));
  CHECK(intact(shared, id, 50'000));
  other->remove({id});
  UNTIL(stat(*other, "removed_but_pinned") == 1);
  own.reset();
  UNTIL(stat(*other, "pins") == 1);
  CHECK_EQ(stat(*other, "used_bytes"), 13 * kPageSize);
  shared.reset();  // the last: now the session ends
  expect_empty(*other);
  UNTIL(check::number(other->stats(), "reaped_sessions") == 1);

  c = b->client();
  const ObjectId kept = put(*c, 50'000);
  shared = get(*c, kept), own = get(*c, kept, true);
  b.reset();
  CHECK(throws_gone([&] { c->stats(); }));
  CHECK(!c->usable());
  const_cast<std::byte*>(own.data())[0] = pattern(kept, 0);
  CHECK(intact(shared, kept, 50'000) && intact(own, kept, 50'000));
}

// ---- waiting

TEST(creates_are_served_in_order_of_arrival) {
  BrokerThread b(8 * kMiB);
  ClientPtr c = b.client();
  wait_populated(*c);
  const ObjectId most = put(*c, 6 * kMiB), rest = put(*c, 2 * kMiB);
  Wire big(b.name), small(b.name);
  big.hello(), small.hello();
  CHECK(!big.send(request(Op::kCreate, {big.session, 1}, 4 * kMiB, -1)));
  UNTIL(big.taken());
  CHECK(!small.send(request(Op::kCreate, {small.session, 1}, 1, 3600 * kSecond)));
  UNTIL(small.taken());
  c->remove({rest});  // room for the small one, which is not the first
  UNTIL(stat(*c, "used_bytes") == 6 * kMiB);
  CHECK(!small.readable());
  Wire late(b.name);  // finds room, and others before it
  late.hello();
  CHECK(!late.send(request(Op::kCreate, {late.session, 1}, 1, -1)));
  UNTIL(late.taken());
  CHECK_EQ(stat(*c, "used_bytes"), 6 * kMiB);
  CHECK(!late.readable());
  std::byte* where;
  CHECK_EQ(c->create(c->new_id(), 1, 0, &where).status, Status::kOk);  // one that cannot wait takes what there is
  c->remove({most});
  for (Wire* w : {&big, &small, &late}) CHECK_EQ(w->receive().status, 0);
}

// Whatever makes the first in the queue go, the next gets its turn at once.
TEST(a_create_that_gives_up_lets_the_next_one_in) {
  for (const char* how : {"deadline", "socket", "process", "kill"}) {
    check::context = how;
    BrokerThread b(8 * kMiB);
    ClientPtr c = b.client();
    wait_populated(*c);
    put(*c, 6 * kMiB);
    const std::string way = how;
    std::unique_ptr<Wire> first;
    std::unique_ptr<Child> process;
    if (way == "process" || way == "kill") {
      process = std::make_unique<Child>(std::vector<std::string>{"waiter", b.name, std::to_string(4 * kMiB)});
      process->expect("sent");
    } else {
      first = std::make_unique<Wire>(b.name);
      first->hello();
      CHECK(!first->send(request(Op::kCreate, {1, 1}, 4 * kMiB, way == "deadline" ? kSecond / 20 : -1)));
      UNTIL(first->taken());
    }
    Wire second(b.name);
    second.hello();
    CHECK(!second.send(request(Op::kCreate, {2, 2}, kMiB, -1)));
    UNTIL(second.taken());
    if (way == "socket") first->fd.reset();
    if (way == "kill") process->kill();
    if (way == "process") process->go();
    UNTIL(second.readable());
    CHECK_EQ(second.receive().status, 0);
    if (way == "deadline") CHECK_EQ(Status(first->receive().status), Status::kFull);
  }
}
ROLE(waiter) {
  Wire w(args[0]);
  w.hello();
  CHECK(!w.send(request(Op::kCreate, {w.session, 1}, std::stoull(args[1]), -1)));
  UNTIL(w.taken());
  say("sent");
  wait_for_go();
  return 0;
}

TEST(a_create_waits_for_memory_to_come_back) {
  BrokerThread b(4 * kMiB);
  ClientPtr c = b.client();
  const ObjectId id = put(*c, 4 * kMiB);
  View v = get(*c, id);
  c->remove({id});
  std::atomic<bool> served{false};
  std::thread waiter([&] {
    ClientPtr w = b.client();
    put(*w, 3 * kMiB);
    served = true;
  });
  for (int i = 0; i < 20; ++i) CHECK_EQ(stat(*c, "pins"), 1u);
  CHECK(!served);
  CHECK(intact(v, id, 4 * kMiB));
  v.reset();
  waiter.join();
  CHECK(served);
}

TEST(full_names_numbers_and_holders) {
  BrokerThread b(8 * kMiB);
  ClientPtr hoarder = b.client("hoarder"), c = b.client("asker");
  wait_populated(*c);
  put(*hoarder, 7 * kMiB);
  std::byte* where;
  for (int64_t timeout : {int64_t(0), kSecond / 100}) {
    const auto a = c->create(c->new_id(), 2 * kMiB, timeout, &where);
    CHECK_EQ(a.status, Status::kFull);
    for (const std::string& part : {std::string("need 2.0 MiB"), std::string("capacity 8.0 MiB"), std::string("used 7.0 MiB"), std::string("free 1.0 MiB"),
                                    "hoarder (pid " + std::to_string(::getpid()) + ") owns 7.0 MiB"})
      if (a.text.find(part) == std::string::npos) check::fail(__FILE__, __LINE__, "no '" + part + "' in: " + a.text);
  }
  for (uint64_t bytes : {8 * kMiB + 1, UINT64_MAX}) CHECK_EQ(c->create(c->new_id(), bytes, -1, &where).status, Status::kTooLarge);
  CHECK_EQ(c->live(), 0u);
  CHECK_EQ(c->create(c->new_id(), kMiB, 0, &where).status, Status::kOk);
}

TEST(get_waits_for_the_seal) {
  BrokerThread b(8 * kMiB);
  ClientPtr c = b.client();
  const ObjectId id = c->new_id(), aborted = c->new_id();
  std::byte* where;
  View v;
  CHECK_EQ(c->get(id, -1, false, &v), Status::kMissing);  // nobody makes it: no reason to wait
  CHECK_EQ(c->create(id, 1000, -1, &where).status, Status::kOk);
  CHECK_EQ(c->get(id, 0, false, &v), Status::kTimeout);
  CHECK_EQ(c->get(id, kSecond / 100, false, &v), Status::kTimeout);
  Wire w(b.name), x(b.name);
  w.hello(), x.hello();
  CHECK(!w.send(request(Op::kGet, id, 0, -1)));
  UNTIL(w.taken());
  CHECK_EQ(stat(*c, "leases"), 1u);
  CHECK(!w.readable());
  CHECK_EQ(c->seal(id, self(id), false, {}), Status::kOk);
  const Reply r = w.receive();
  CHECK_EQ(r.status, 0);
  CHECK_EQ(r.size, 1000u);
  CHECK_EQ(stat(*c, "pins"), 1u);

  CHECK_EQ(c->create(aborted, 1000, -1, &where).status, Status::kOk);
  CHECK(!x.send(request(Op::kGet, aborted, 0, -1)));
  UNTIL(x.taken());
  c->abort(aborted);
  CHECK_EQ(Status(x.receive().status), Status::kMissing);
}

TEST(wait_counts_what_can_be_read) {
  BrokerThread b(8 * kMiB);
  ClientPtr c = b.client();
  const ObjectId there = put(*c, 10), coming = c->new_id(), never{1, 1};
  std::byte* where;
  CHECK_EQ(c->create(coming, 10, -1, &where).status, Status::kOk);
  const std::vector<ObjectId> ids = {never, there, coming};
  CHECK(c->wait(ids, 1, -1) == std::string("\0\1\0", 3));
  CHECK(c->wait(ids, 2, 0) == std::string("\0\1\0", 3));
  CHECK(c->wait(ids, 2, kSecond / 100) == std::string("\0\1\0", 3));
  CHECK(c->wait({}, 5, -1).empty());
  CHECK(c->wait({there, there}, 2, -1) == std::string("\1\1"));
  Wire w(b.name);
  w.hello();
  CHECK(!w.send_ids(request(Op::kWait, {}, 2, -1), ids));
  UNTIL(w.taken());
  CHECK_EQ(stat(*c, "leases"), 1u);
  CHECK(!w.readable());
  CHECK_EQ(c->seal(coming, self(coming), false, {}), Status::kOk);
  std::string ready;
  CHECK_EQ(w.receive(&ready).size, 2u);
  CHECK(ready == std::string("\0\1\1", 3));
}

// ---- deaths

ROLE(holder) {
  ClientPtr c = Client::connect(args[0], "holder");
  std::byte* where;
  CHECK_EQ(c->create(c->new_id(), kMiB, -1, &where).status, Status::kOk);
  const ObjectId id = put(*c, kMiB);
  View v = get(*c, id), w = get(*c, id, true);
  if (args[1] == "fork" && ::fork() == 0) {
    say("child");
    wait_for_go();  // keeps every socket of its parent open
    ::_exit(0);
  }
  if (args[1] == "close") {
    // As a daemon does. The process lives on with its maps.
    CHECK(!::close_range(3, ~0u, 0));
    say("closed");
  }
  if (args[1] == "exit") ::_exit(0);
  say("ready");
  wait_for_go();
  for (;;) ::pause();
}

TEST(a_fork_child_with_the_sockets_does_not_keep_its_dead_parents_memory) {
  BrokerThread b(16 * kMiB);
  ClientPtr c = b.client();
  Child holder({"holder", b.name, "fork"});
  const std::string one = holder.line(), two = holder.line();
  CHECK(one + two == "childready" || one + two == "readychild");
  CHECK_EQ(stat(*c, "pins"), 2u);
  CHECK_EQ(stat(*c, "leases"), 1u);
  CHECK_EQ(stat(*c, "used_bytes"), 2 * kMiB);
  holder.kill();
  expect_empty(*c);
  CHECK_EQ(stat(*c, "reaped_leases"), 1u);
  CHECK_EQ(stat(*c, "reaped_pins"), 2u);
  holder.wait();
}  // the grandchild sees its standard input end

TEST(a_client_that_closed_its_sockets_keeps_its_memory_until_it_dies) {
  BrokerThread b(16 * kMiB);
  ClientPtr c = b.client();
  Child holder({"holder", b.name, "close"});
  holder.expect("closed");
  for (int i = 0; i < 50; ++i) {  // time for the broker to see the end of file, not a proof that it did
    CHECK_EQ(stat(*c, "leases"), 1u);
    CHECK_EQ(stat(*c, "pins"), 2u);
  }
  holder.kill();
  expect_empty(*c);
}

TEST(an_exit_frees_all) {
  BrokerThread b(16 * kMiB);
  ClientPtr c = b.client();
  CHECK_EQ(Child({"holder", b.name, "exit"}).wait(), 0);
  expect_empty(*c);
}

TEST(bye_is_not_believed_of_one_that_holds_something) {
  BrokerThread b(8 * kMiB);
  ClientPtr c = b.client();
  Wire w(b.name);
  w.hello();
  CHECK_EQ(w.ask(request(Op::kCreate, {w.session, 1}, 100, -1)), Status::kOk);
  CHECK(!w.send(request(Op::kBye)));
  CHECK(w.hung_up());
  CHECK_EQ(stat(*c, "leases"), 1u);
  Wire again(b.name);
  again.attach(w.session);
  CHECK(!again.send(request(Op::kAbort, {w.session, 1})));
  CHECK(!again.send(request(Op::kBye)));
  CHECK(again.hung_up());
  expect_empty(*c);
  Wire late(b.name);
  CHECK_EQ(late.ask(request(Op::kAttach, {w.session, 0})), Status::kBad);
}

ROLE(forker) {
  ClientPtr c = Client::connect(args[0], "forker");
  const ObjectId id = put(*c, 10'000);
  View v = get(*c, id);
  const pid_t child = ::fork();
  if (!child) {
    int wrong = 0;
    wrong |= !throws_gone([&] { c->stats(); });
    wrong |= !throws_gone([&] { View w; c->get(id, 0, false, &w); }) << 1;
    wrong |= c->usable() << 2;
    wrong |= !intact(v, id, 10'000) << 3;
    v.reset();  // must not unpin for the parent
    c->remove({id});
    c->unclaim(self(id));
    c.reset();
    wrong |= !intact(get(*Client::connect(args[0], "child"), id), id, 10'000) << 4;
    ::_exit(wrong);
  }
  int status;
  ::waitpid(child, &status, 0);
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK_EQ(stat(*c, "pins"), 1u);
  CHECK(intact(v, id, 10'000));
  return 0;
}

TEST(a_forked_child_is_no_client_until_it_connects) {
  BrokerThread b(8 * kMiB);
  CHECK_EQ(Child({"forker", b.name}).wait(), 0);
  expect_empty(*b.client());
}

// A broker in a process of its own, which can be stopped.
ROLE(broker) {
  Broker broker(harness::config(args[0], std::stoull(args[1])));
  say("serving");
  broker.run();
  return 0;
}
ROLE(guest) {
  Wire post(args[0]), calls(args[0]);
  Fd own = pidfd_of(::getpid());
  post.hello("guest", own.get());
  calls.attach(post.session);
  say("ready");
  wait_for_go();
  CHECK(!post.send(request(Op::kBye)));
  say("bye");
  wait_for_go();
  return 0;
}

// One round of the broker's loop may see a session end, newcomers get its descriptor numbers, and what the kernel had to say about the
// old owners of those numbers. None of that may end a newcomer's session: its memory would be used again under its eyes.
TEST(events_of_a_dead_session_do_not_hit_a_new_one_with_its_descriptors) {
  for (size_t count = 1; count <= 4; ++count) {
    check::context = std::to_string(count) + " newcomers";
    const std::string name = harness::random_name();
    Child broker({"broker", name, std::to_string(4 * kMiB)});
    broker.expect("serving");
    Child guest({"guest", name});
    guest.expect("ready");
    broker.stop();
    guest.go();
    guest.expect("bye");
    Fd own = pidfd_of(::getpid());
    const int one[] = {own.get()};
    std::vector<Wire> newcomers;
    for (size_t i = 0; i < count; ++i) {
      newcomers.emplace_back(name);
      CHECK(!newcomers.back().send(request(Op::kHello, {}, kProtocolVersion), {}, one));
    }
    guest.go();
    CHECK_EQ(guest.wait(), 0);
    broker.signal(SIGCONT);
    for (Wire& w : newcomers) {
      w.session = w.receive().aux;
    }
    for (Wire& w : newcomers) CHECK_EQ(w.ask(request(Op::kCreate, {w.session, 1}, 10, -1)), Status::kOk);
    std::string stats;
    CHECK_EQ(newcomers[0].ask(request(Op::kStats), &stats), Status::kOk);
    CHECK_EQ(check::number(stats, "leases"), count);
    CHECK_EQ(check::number(stats, "reaped_sessions"), 1u);
  }
}

TEST(a_broker_that_dies_during_the_handshake) {
  const std::string name = harness::random_name();
  Fd listener = listen_abstract(name);
  std::thread fake([&] {
    Fd fd;
    UNTIL((fd.reset(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)), fd));
    std::vector<char> hello(kMaxMessage);
    CHECK(recv_message(fd.get(), hello.data(), hello.size()) > 0);
    listener.reset();  // before the client's second socket
    Reply r;
    r.count = 16;
    CHECK(!send_message(fd.get(), &r, sizeof r, "0123456789abcdef", 16));
  });
  CHECK(throws_gone([&] { Client::connect(name, "x"); }));
  fake.join();
}

// What does not fit into the socket of a broker that is behind must reach it all the same, or pins stay for ever.
TEST(releases_reach_a_broker_that_was_behind) {
  for (const char* then : {"nothing", "post", "close"}) {
    check::context = then;
    const std::string name = harness::random_name();
    Child broker({"broker", name, std::to_string(4 * kMiB)});
    broker.expect("serving");
    ClientPtr c = Client::connect(name, "reader"), other = Client::connect(name, "other");
    const ObjectId id = put(*other, 100);
    std::vector<View> views(3000);
    for (View& v : views) v = get(*c, id);
    CHECK_EQ(stat(*other, "pins"), 3000u);
    broker.stop();
    views.clear();
    if (!std::strcmp(then, "close")) c->close();
    broker.signal(SIGCONT);
    if (!std::strcmp(then, "post")) c->unclaim(self(id));
    UNTIL(stat(*other, "pins") == 0);
    if (!std::strcmp(then, "close")) UNTIL(stat(*other, "reaped_sessions") == 1);
  }
}

// More than the broker reads at a time, then goodbye, then death: all before the broker looks. The end of the session comes once.
ROLE(talker) {
  Wire post(args[0]);
  Fd own = pidfd_of(::getpid());
  post.hello("talker", own.get());
  const ObjectId id{post.session, 1};
  CHECK_EQ(post.ask(request(Op::kCreate, id, 100, -1)), Status::kOk);
  say("ready");
  wait_for_go();
  Request seal = request(Op::kSeal, id, 0, 0, key_of(ClaimKind::kReturn, id));
  seal.flags = kOneWay;
  for (int i = 0; i < 40; ++i) CHECK(!post.send(request(Op::kUnclaim, {}, 0, 0, self({1, 1}))));
  CHECK(!post.send(seal));
  if (args[1] == "bye") CHECK(!post.send(request(Op::kBye)));
  return 0;
}

TEST(what_a_process_sent_before_it_died_counts_once) {
  for (const char* how : {"bye", "no bye"}) {
    check::context = how;
    const std::string name = harness::random_name();
    Child broker({"broker", name, std::to_string(4 * kMiB)});
    broker.expect("serving");
    ClientPtr c = Client::connect(name, "heir");
    Child talker({"talker", name, how});
    talker.expect("ready");
    broker.stop();
    talker.go();
    CHECK_EQ(talker.wait(), 0);
    broker.signal(SIGCONT);
    UNTIL(stat(*c, "reaped_sessions") == 1);
    CHECK_EQ(stat(*c, "objects"), 1u);  // a return value survives its maker
  }
}

// Calls and one-way messages go by different sockets. What a thread sends it must see done in its next call.
TEST(a_call_does_not_overtake_one_way_messages) {
  const std::string name = harness::random_name();
  Child broker({"broker", name, std::to_string(4 * kMiB)});
  broker.expect("serving");
  Wire posts(name), calls(name);
  posts.hello();
  calls.attach(posts.session);
  for (bool after : {true, false}) {
    const ObjectId id{posts.session, uint64_t(1 + after)};
    CHECK_EQ(calls.ask(request(Op::kCreate, id, 100, -1)), Status::kOk);
    CHECK_EQ(calls.ask(request(Op::kSeal, id, 0, 0, self(id))), Status::kOk);
    broker.stop();  // so that the call is the first it sees
    Request q = request(Op::kGet, id, 0, -1);
    q.flags = after ? kAfter : 0;
    CHECK(!calls.send(q));
    for (int i = 0; i < 30; ++i) CHECK(!posts.send(request(Op::kUnclaim, {}, 0, 0, self({1, 1}))));
    CHECK(!posts.send_ids(request(Op::kDelete), {id}));
    broker.signal(SIGCONT);
    CHECK_EQ(Status(calls.receive().status), after ? Status::kMissing : Status::kOk);
  }
  ClientPtr c = Client::connect(name, "x");
  for (int i = 0; i < 300; ++i) {
    const ObjectId id = c->new_id();
    std::byte* where;
    View v;
    CHECK_EQ(c->create(id, 100, -1, &where).status, Status::kOk);
    CHECK_EQ(c->seal(id, self(id), false, {}), Status::kOk);
    CHECK_EQ(c->get(id, 0, false, &v), Status::kOk);
    v.reset();
    c->remove({id});
    CHECK_EQ(c->get(id, 0, false, &v), Status::kMissing);
  }
}

// A signal ends a call that waits; what the broker grants at that very moment is nobody's. The moment is before the broker has read the
// request, or after it has answered and before the client has given up.
TEST(an_interrupted_call_leaves_no_pin_and_no_lease) {
  const std::string name = harness::random_name();
  Child broker({"broker", name, std::to_string(4 * kMiB)});
  broker.expect("serving");
  ClientPtr c = Client::connect(name, "reader"), other = Client::connect(name, "other");
  const ObjectId id = put(*other, 100);
  View kept = get(*c, id);
  static std::function<void()> meanwhile;
  static std::atomic<bool> called;
  Client::interrupted = [] {
    if (!called.exchange(true)) meanwhile();
    return true;
  };
  struct sigaction act = {};
  act.sa_handler = [](int) {};
  ::sigaction(SIGUSR1, &act, nullptr);
  for (bool create : {false, true})
    for (bool answered : {false, true}) {
      check::context = std::string(create ? "create" : "get") + (answered ? ", answered" : ", unread");
      c->stats();  // leaves an idle socket: the call must not have to ask a stopped broker for one
      broker.stop();
      called = false;
      meanwhile = [&] {
        if (!answered) return;
        broker.signal(SIGCONT);
        UNTIL(create ? stat(*other, "leases") == 1 : stat(*other, "pins") == 2);
      };
      std::atomic<bool> interrupted{false};
      std::thread caller([&] {
        try {
          View v;
          std::byte* where;
          if (create) c->create(c->new_id(), 100, -1, &where);
          else c->get(id, -1, false, &v);
        } catch (const Interrupted&) {
          interrupted = true;
        }
      });
      while (!called) ::pthread_kill(caller.native_handle(), SIGUSR1), std::this_thread::yield();
      caller.join();
      CHECK(interrupted);
      if (!answered) broker.signal(SIGCONT);
      // The broker may not have come to the request yet; its answers to later ones say that it has.
      c->stats();
      UNTIL(stat(*other, "pins") == 1 && stat(*other, "leases") == 0);
      CHECK(intact(kept, id, 100) && c->usable());
    }
  Client::interrupted = nullptr;
}

// ---- claims across processes

TEST(questions_and_answers) {
  BrokerThread b(8 * kMiB);
  ClientPtr maker = b.client("maker"), owner = b.client("owner"), bystander = b.client("bystander");
  owner->listen();
  bystander->listen();
  bool twice = false;
  try {
    owner->listen();
  } catch (const std::runtime_error&) {
    twice = true;
  }
  CHECK(twice);
  ClaimKey asked;
  CHECK(!owner->next_event(0, &asked));
  auto make = [&](const ClaimKey& key) {
    const ObjectId id = maker->new_id();
    std::byte* where;
    CHECK_EQ(maker->create(id, 100, -1, &where).status, Status::kOk);
    CHECK_EQ(maker->seal(id, key, false, {}), Status::kOk);
    return id;
  };
  const ClaimKey first = key_of(ClaimKind::kReturn, {1, 1}), second = key_of(ClaimKind::kReturn, {1, 2});
  const ObjectId id = make(first);
  for (const ClientPtr& c : {owner, bystander}) {
    UNTIL(c->next_event(100, &asked));
    CHECK(asked == first);
  }
  bystander->disown(first, false);
  owner->adopt(first);
  UNTIL(stat(*maker, "claims_unanswered") == 0);
  make(second);
  UNTIL(owner->next_event(100, &asked));
  CHECK(asked == second);
  owner->disown(second, true);
  UNTIL(stat(*maker, "objects") == 1);
  CHECK(!bystander->next_event(0, &asked));  // the owner of the last return was asked alone
  maker->close();
  maker.reset();
  CHECK_EQ(get(*owner, id).size(), 100u);
  owner->unclaim(first);
  expect_empty(*owner);
}

// Events that did not fit wait in the broker; once they are out it must sleep again.
TEST(a_slow_listener_gets_everything_and_costs_nothing_after) {
  for (int backlog : {1, 40}) {
    BrokerThread b(64 * kMiB);
    ClientPtr c = b.client();
    Wire calls(b.name), events(b.name);
    calls.hello();
    events.attach(calls.session, true);
    auto waiting = [&] {
      int bytes = 0;
      CHECK(!::ioctl(events.fd.get(), FIONREAD, &bytes));
      return size_t(bytes) / sizeof(Event);
    };
    size_t made = 0;
    auto make = [&] {
      const ClaimKey key = key_of(ClaimKind::kReturn, {9, ++made});
      CHECK_EQ(c->put_inline(c->new_id(), "x", 1, key, false), Status::kOk);
      CHECK_EQ(stat(*c, "claims"), made);  // by then the broker has sent the question, or could not
    };
    do make();
    while (waiting() == made);
    for (int i = 1; i < backlog; ++i) make();
    for (size_t i = 1; i <= made; ++i) {
      UNTIL(events.readable());
      Event e;
      CHECK_EQ(recv_message(events.fd.get(), &e, sizeof e), ssize_t(sizeof e));
      CHECK(e.key == key_of(ClaimKind::kReturn, {9, i}));
    }
    CHECK_EQ(stat(*c, "claims"), made);
    const double before = b.cpu_seconds();
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(400);
    while (std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      CHECK(b.cpu_seconds() - before < 0.1);
    }
  }
}

// ---- brokers

TEST(one_broker_a_name) {
  BrokerThread b(4 * kMiB);
  bool taken = false;
  try {
    Broker second(harness::config(b.name, 4 * kMiB));
  } catch (const std::system_error& e) {
    taken = e.code().value() == EADDRINUSE;
  }
  CHECK(taken);
  BrokerThread other(4 * kMiB);
  CHECK(std::memcmp(b.client()->pool_id(), other.client()->pool_id(), 16) != 0);
  CHECK(throws_gone([] { Client::connect(harness::random_name(), "x"); }));
}

TEST(a_client_does_not_take_a_new_broker_for_its_own) {
  auto b = std::make_unique<BrokerThread>(4 * kMiB);
  const std::string name = b->name;
  ClientPtr c = b->client();
  const ObjectId id = put(*c, 100);
  View kept = get(*c, id), v;
  b.reset();
  b = std::make_unique<BrokerThread>(4 * kMiB, 1e6, name);
  for (int i = 0; i < 3; ++i) CHECK(throws_gone([&] { c->get(id, 0, false, &v); }));
  CHECK(!c->usable() && intact(kept, id, 100));
  kept.reset();
  c->remove({id});
  c->close();
  expect_empty(*b->client());
}

TEST(a_broker_leaves_when_nobody_needs_it) {
  BrokerThread b(4 * kMiB, 0.01);
  ClientPtr c = b.client(), other = b.client();
  View v = get(*c, put(*other, 10));
  c->close();
  other.reset();
  for (int i = 0; i < 20; ++i) CHECK(!b.done());  // a view lives
  v.reset();
  UNTIL(b.done());
}

ROLE(idle) {
  say("ready");
  wait_for_go();
  return 0;
}
TEST(a_broker_leaves_with_the_process_it_watches) {
  Child watched({"idle"});
  watched.expect("ready");
  BrokerThread b(4 * kMiB, 1e6, harness::random_name(), watched.pid);
  ClientPtr c = b.client();
  CHECK(!b.done());
  watched.kill();
  UNTIL(b.done());
  watched.wait();
}

TEST(memory_is_populated_as_it_is_needed) {
  const std::string name = harness::random_name();
  BrokerConfig config = harness::config(name, 200 * kMiB);
  config.prefault = kMiB;
  Broker broker(config);
  std::thread loop([&] { broker.run(); });
  ClientPtr c = Client::connect(name, "x");
  UNTIL(stat(*c, "populated_bytes") > 0);
  CHECK(stat(*c, "populated_bytes") < 200 * kMiB);
  // Much more than is there: waits for the kernel, not for somebody to free.
  std::byte* where;
  CHECK_EQ(c->create(c->new_id(), 150 * kMiB, 600 * kSecond, &where).status, Status::kOk);
  where[0] = where[150 * kMiB - 1] = std::byte{1};
  broker.stop();
  loop.join();
}

// ---- clients that do not behave (the fuzzer does the rest)

TEST(a_descriptor_that_is_no_pidfd) {
  BrokerThread b(4 * kMiB);
  Fd file(::memfd_create("not a process", MFD_CLOEXEC));
  Wire w(b.name);
  w.hello("raw", file.get());
  CHECK_EQ(w.ask(request(Op::kCreate, {w.session, 1}, 10, -1)), Status::kOk);
  CHECK_EQ(stat(*b.client(), "leases"), 1u);
}

TEST(a_label_too_long_does_not_spoil_what_others_are_told) {
  BrokerThread b(4 * kMiB);
  ClientPtr c = b.client();
  wait_populated(*c);
  std::vector<Wire> rude;
  for (int i = 0; i < 6; ++i) {
    rude.emplace_back(b.name);
    rude.back().hello(std::string(60'000, '"'));
    CHECK_EQ(rude.back().ask(request(Op::kCreate, {rude.back().session, 1}, 100'000, -1)), Status::kOk);
  }
  std::byte* where;
  CHECK_EQ(c->create(c->new_id(), 4 * kMiB, 0, &where).status, Status::kFull);
  CHECK_EQ(stat(*c, "leases"), 6u);
}

TEST(messages_that_end_a_connection) {
  BrokerThread b(4 * kMiB);
  ClientPtr c = b.client();
  auto cut_off = [&](bool joined, auto&& send) {
    Wire w(b.name);
    if (joined) w.hello();
    send(w);
    CHECK(w.hung_up());
  };
  const ObjectId id = put(*c, 100);
  cut_off(false, [](Wire& w) { CHECK(!send_message(w.fd.get(), "short", 5)); });
  cut_off(false, [&](Wire& w) { CHECK(!w.send(request(Op::kGet, id))); });  // before hello
  cut_off(false, [](Wire& w) { CHECK(!w.send(request(Op(0)))); });
  cut_off(true, [](Wire& w) { CHECK(!w.send(request(Op(uint16_t(Op::kLast) + 1)))); });
  cut_off(true, [](Wire& w) { CHECK(!w.send(request(Op::kHello, {}, kProtocolVersion))); });
  cut_off(true, [](Wire& w) { CHECK(!w.send(request(Op::kAttach, {w.session, 0}))); });
  cut_off(true, [](Wire& w) { CHECK(!w.send(request(Op::kRelease), "not a whole id")); });
  cut_off(true, [](Wire& w) {
    Request q = request(Op::kWait);
    q.count = UINT32_MAX;  // and none follow
    CHECK(!w.send(q));
  });
  cut_off(true, [](Wire& w) { CHECK(!w.send(request(Op::kPutInline), std::string(kMaxMessage, 'x'))); });
  cut_off(true, [](Wire& w) {  // a second request while the first one waits
    CHECK_EQ(w.ask(request(Op::kCreate, {w.session, 1}, 10, -1)), Status::kOk);
    CHECK(!w.send(request(Op::kGet, {w.session, 1}, 0, -1)));
    CHECK(!w.send(request(Op::kStats)));
  });
  cut_off(false, [&](Wire& w) {  // speech on a socket that is for listening
    Wire other(b.name);
    other.hello();
    w.attach(other.session, true);
    CHECK(!w.send(request(Op::kStats)));
  });
  Wire old(b.name);
  std::string why;
  CHECK_EQ(old.ask(request(Op::kHello, {}, kProtocolVersion + 1), &why), Status::kBad);
  CHECK(why.find("protocol version") != std::string::npos);
  CHECK(old.hung_up());
  CHECK(intact(get(*c, id), id, 100));
}

}  // namespace

int main(int argc, char** argv) { return harness::main(argc, argv); }
