// A peer server with a broker and real sockets: what it answers, whom it refuses, and that whoever fails leaves nothing behind.
#include <algorithm>

#include "peer_support.h"

using namespace peer_support;

namespace {

constexpr int64_t kMinute = 60 * kSecond;

struct Home {
  explicit Home(Server::Options options = {}, uint64_t capacity = 48 * kMiB) : broker(capacity), client(broker.client()), served(broker.client("server")) {
    wait_populated(*client);
    server.emplace(served, "127.0.0.1", 0, kSecret, options);
  }
  uint16_t port() const { return server->port(); }
  // Nobody is connected, and nothing is held for anybody.
  void expect_nobody() {
    Server::Stats s{};
    UNTIL((s = server->stats(), s.connections == 0 && s.sessions == 0 && s.pins == 0 && s.replicas == 0));
    UNTIL(stat(*client, "pins") == 0);
  }
  // The server is over, and the kernel has nothing of it.
  void expect_nothing() {
    server.reset();
    UNTIL(stat(*client, "pins") == 0);
    CHECK_EQ(tcp_sockets(), 0u);
  }
  BrokerThread broker;
  ClientPtr client, served;
  std::optional<Server> server;
};

// Lives inside the broker, and in no arena.
ObjectId put_tiny(Client& c) {
  const ObjectId id = c.new_id();
  std::byte bytes[100];
  fill(bytes, id, sizeof bytes);
  CHECK_EQ(c.put_inline(id, bytes, sizeof bytes, self(id), false), Status::kOk);
  CHECK(c.wait({id}, 1, -1) == "\1");
  return id;
}

TEST(pins_reads_and_unpins) {
  Home h;
  auto one = connect(h.port(), token('a')), two = connect(h.port(), token('a'));
  std::vector<std::byte> into;
  for (size_t n : {1, 100, 8000, 65'536, 65'537, 300'001, 9 * int(kMiB) + 3}) {
    check::context = std::to_string(n) + " bytes";
    const ObjectId id = n == 100 ? put_tiny(*h.client) : put(*h.client, n);
    const Pinned p = one->pin({id}, kMinute, "", false).at(0);
    CHECK(p.code == Code::kOk && p.size == n && p.available == n && p.source.empty() && p.inlined.empty());
    CHECK_EQ(h.server->stats().pins, 1u);
    CHECK_EQ(p.region < kCopies, n != 100);
    CHECK_EQ(stat(*h.client, "pins"), n != 100);
    const Piece all = piece(p, &into);
    two->read({&all, 1}, kMinute);
    CHECK(intact(into, id));
    const Pinned again = two->pin({id}, kMinute, "", true).at(0);
    CHECK((again.code == Code::kInline) == (n <= kInlinePin));
    if (again.code == Code::kInline) CHECK(std::string_view(again.inlined) == bytes_of(*into.data(), n));
    else CHECK(two->unpin({id}, kMinute, false));
    CHECK_EQ(h.server->stats().pins, 1u);
    CHECK(two->unpin({id}, kMinute, false));  // any link of the session
    CHECK_EQ(h.server->stats().pins, 0u);
    UNTIL(stat(*h.client, "pins") == 0);
    CHECK(!one->unpin({id}, kMinute, false));
  }
  CHECK(one->pin({{7, 7}}, kMinute, "", true).at(0).code == Code::kMissing);
  one.reset(), two.reset();
  h.expect_nobody();
  h.expect_nothing();
}

TEST(small_ones_are_kept_in_one_message) {
  Home h;
  std::vector<ObjectId> ids = {put_tiny(*h.client), put(*h.client, 65'536), put(*h.client, 65'537), {7, 7}};
  for (int i = 0; i < 20; ++i) ids.push_back(put(*h.client, 60'000));
  auto link = connect(h.port(), token('a'));
  const std::vector<Pinned> got = link->pin(ids, kMinute, "", true, true);
  size_t inlined = 0;
  for (size_t i = 0; i < got.size(); ++i)
    if (got[i].code == Code::kInline) {
      ++inlined;
      for (size_t k = 0; k < got[i].inlined.size(); ++k) CHECK(std::byte(got[i].inlined[k]) == pattern(ids[i], k));
    }
  CHECK(got[0].code == Code::kInline && got[1].code == Code::kInline && got[2].code == Code::kOk && got[3].code == Code::kMissing);
  CHECK(inlined >= 8 && inlined <= kInlineReply / 60'000 + 1);  // what does not fit is pinned
  CHECK_EQ(h.server->stats().replicas, inlined);
  CHECK_EQ(h.server->stats().pins, ids.size() - 1 - inlined);
  CHECK_EQ(h.server->stats().requests, 1u);
  UNTIL(stat(*h.client, "pins") == ids.size() - 1 - inlined);
  link.reset();
  h.expect_nobody();
}

TEST(a_removed_object_stays_while_it_is_pinned) {
  Home h;
  auto link = connect(h.port(), token('a'));
  const ObjectId id = put(*h.client, kMiB);
  const Pinned p = link->pin({id}, kMinute, "", false).at(0);
  h.client->remove({id});
  UNTIL(is_missing(*h.client, id));
  put(*h.client, kMiB);  // not there
  std::vector<std::byte> into;
  const Piece all = piece(p, &into);
  link->read({&all, 1}, kMinute);
  CHECK(intact(into, id));
  CHECK(link->unpin({id}, kMinute, false));
  CHECK(link->pin({id}, kMinute, "", false).at(0).code == Code::kMissing);
}

TEST(handshakes_have_a_time_limit) {
  Home h({.handshake_ns = 50'000'000});
  std::unique_ptr<Link> link;
  while (!link) try {
      link = connect(h.port(), token('a'));
    } catch (const PeerError&) {  // this machine is busy
    }
  const uint64_t before = h.server->stats().refused;
  Raw silent(h.port()), half(h.port()), unread(h.port());
  if (half.challenged()) send_all(half.fd, bytes_of(half.proof(token('b'))).substr(0, 100));
  CHECK(silent.hung_up() && half.hung_up());
  UNTIL(h.server->stats().connections == 1);
  CHECK_EQ(h.server->stats().refused, before + 3);
  CHECK(link->describe(kMinute).empty());  // the limit is for handshakes only
}

TEST(a_wrong_secret_is_refused) {
  Home h;
  Link::Options o;
  o.session = token('a');
  CHECK(failure([&] { Link::connect("127.0.0.1", h.port(), kSecret + "!", o); }).kind == PeerError::kRefused);
  Raw raw(h.port());
  CHECK(raw.challenged());
  Proof p = raw.proof(token('a'));
  p.session[0] ^= 1;  // after it was signed
  CHECK(send_all(raw.fd, bytes_of(p)));
  Welcome w;
  CHECK(read_all(raw.fd, &w, sizeof w) && w.status == 1 && raw.hung_up());
  UNTIL(h.server->stats().connections == 0);
  CHECK_EQ(h.server->stats().refused, 2u);
  CHECK_EQ(h.server->stats().requests, 0u);
  const Fake fake([](const Fd& fd) { Fake::wait_for_the_end(fd); }, "another");
  CHECK(failure([&] { Link::connect("127.0.0.1", fake.port(), kSecret, o); }).kind == PeerError::kRefused);
}

// A proof that was good once is good for nobody else.
TEST(a_proof_cannot_be_said_again) {
  Home h;
  Raw one(h.port()), two(h.port());
  CHECK(one.challenged() && two.challenged());
  const Proof p = one.proof(token('a'));
  Welcome w;
  CHECK(send_all(one.fd, bytes_of(p)) && read_all(one.fd, &w, sizeof w) && w.status == 0);
  CHECK(send_all(two.fd, bytes_of(p)) && read_all(two.fd, &w, sizeof w) && w.status == 1);
}

TEST(strangers_starve_nobody) {
  Home h({.handshake_ns = kMinute});
  const ObjectId id = put(*h.client, 300'000);
  auto link = connect(h.port(), token('a'));
  std::vector<std::unique_ptr<Raw>> crowd;
  std::vector<std::byte> into;
  for (int i = 0; i < 600; ++i) {
    crowd.push_back(std::make_unique<Raw>(h.port()));
    CHECK(crowd.back()->challenged());  // the newest is let in, in place of one that has had its time
    CHECK(h.server->stats().connections <= 256 + 16);
    if (i % 50) continue;
    const Piece all = piece(link->pin({id}, kMinute, "", false).at(0), &into);
    link->read({&all, 1}, kMinute);
    CHECK(intact(into, id) && link->unpin({id}, kMinute, false));
    CHECK(connect(h.port(), token('b'))->describe(kMinute).empty());  // who knows the secret comes in
  }
  CHECK(h.server->stats().refused >= 600 - 256);
  CHECK(crowd.front()->hung_up());
  crowd.clear();
  link.reset();
  h.expect_nobody();
}

TEST(a_puller_that_vanishes) {
  Home h({.zero_copy = Server::Options::ZeroCopy::kAlways});
  const ObjectId id = put(*h.client, 24 * kMiB), other = put_tiny(*h.client);
  for (const bool reset : {true, false})
    for (const size_t taken : {size_t(0), sizeof(Frame), 3 * kMiB}) {
      check::context = "taken " + std::to_string(taken);
      Raw raw(h.port());
      CHECK_EQ(raw.prove(token('a')).value(), 0u);
      const Entry e = raw.pin(id);
      CHECK(raw.pin(other).region >= kCopies);
      CHECK_EQ(h.server->stats().pins, 2u);
      CHECK(raw.ask_read(e.region, e.offset, e.size));
      std::string some(taken, '\0');
      CHECK(read_all(raw.fd, some.data(), taken));
      if (reset) reset_on_close(raw.fd);
      raw.fd.reset();
      h.expect_nobody();
    }
  h.expect_nothing();
}

// Its pins go with it, and not those that another has of the same.
TEST(a_puller_that_stops_reading) {
  Home h({.stall_ns = 100'000'000});
  const ObjectId id = put(*h.client, 24 * kMiB);
  auto link = connect(h.port(), token('b'));
  CHECK(link->pin({id}, kMinute, "", false).at(0).code == Code::kOk);
  Raw raw(h.port(), 64 << 10);
  CHECK_EQ(raw.prove(token('a')).value(), 0u);
  const Entry e = raw.pin(id);
  CHECK_EQ(h.server->stats().pins, 2u);
  CHECK(raw.ask_read(e.region, e.offset, e.size));
  UNTIL(h.server->stats().sessions == 1);
  CHECK_EQ(h.server->stats().pins, 1u);
  CHECK_EQ(h.server->stats().connections, 1u);
  Raw idle(h.port());  // has no bytes to take
  CHECK_EQ(idle.prove(token('c')).value(), 0u);
  CHECK(link->unpin({id}, kMinute, false));
  CHECK(idle.pin(id).code == 0);
}

TEST(a_server_that_vanishes_or_stalls) {
  std::vector<std::byte> into(2 * kMiB);
  const Piece all{0, 0, reinterpret_cast<uint64_t>(into.data()), into.size()};
  for (const bool headed : {true, false})
    for (const int how : {0, 1, 2}) {
      check::context = "how " + std::to_string(how);
      const Fake fake([&](const Fd& fd) {
        const uint64_t n = Fake::asked(fd);
        if (headed && !(Fake::head(fd, n) && send_all(fd, std::string(n / 2, 'x')))) return;
        if (how == 0) reset_on_close(fd);
        if (how == 2) Fake::wait_for_the_end(fd);
      });
      auto link = connect(fake.port(), token('a'));
      const int64_t start = now_ns();
      const PeerError e = failure([&] { link->read({&all, 1}, how == 2 ? 50'000'000 : kMinute); });
      if (how == 2) CHECK(e.kind == PeerError::kOther && e.error == ETIMEDOUT && now_ns() - start >= 50'000'000);
      else CHECK(e.kind == PeerError::kLost);
      CHECK(link->closed());
      CHECK(failure([&] { link->describe(kMinute); }).error == EBADF);
    }
}

// Bytes that keep trickling in are no excuse.
TEST(a_server_that_is_too_slow) {
  std::vector<std::byte> into(8 * kMiB);
  const Piece all{0, 0, reinterpret_cast<uint64_t>(into.data()), into.size()};
  std::atomic<bool> over{false};
  const Fake fake([&](const Fd& fd) {
    if (!Fake::head(fd, Fake::asked(fd))) return;
    while (!over && send_all(fd, "x")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  auto link = connect(fake.port(), token('a'));
  CHECK_EQ(failure([&] { link->read({&all, 1}, 50'000'000); }).error, ETIMEDOUT);
  over = true;
}

TEST(one_of_four_streams_is_lost) {
  std::vector<char> into(80 * kMiB);
  const Piece all{0, 0, reinterpret_cast<uint64_t>(into.data()), into.size()};
  const std::string some(kMiB / 2, 'x');
  std::atomic<int> connections{0}, asked{0};
  const Fake fake([&](const Fd& fd) {
    const bool bad = connections++ == 2;
    bool first = true;
    for (uint64_t left; (left = Fake::asked(fd));) {
      if (std::exchange(first, false) && ++asked <= 4) UNTIL(asked >= 4);  // all have something to do
      if (!Fake::head(fd, left)) return;
      for (; left; left -= std::min<uint64_t>(left, some.size())) {
        if (!send_all(fd, std::string_view(some).substr(0, left))) return;
        if (bad) return reset_on_close(fd);
      }
    }
  });
  std::vector<std::unique_ptr<Link>> links;
  std::vector<Link*> four;
  for (int i = 0; i < 4; ++i) {
    links.push_back(connect(fake.port(), token('a')));
    UNTIL(connections == i + 1);
    four.push_back(links.back().get());
  }
  const PeerError e = failure([&] { read_striped(four, {&all, 1}, kMinute); });
  CHECK(e.kind == PeerError::kLost && e.op == "read" && e.peer == links[2]->peer());
  CHECK(links[2]->closed());
  four.erase(four.begin() + 2);  // the others are in order
  std::fill(into.begin(), into.end(), 0);
  read_striped(four, {&all, 1}, kMinute);
  CHECK(size_t(std::count(into.begin(), into.end(), 'x')) == into.size());
}

TEST(how_far_a_read_has_come) {
  Home h;
  const ObjectId id = put(*h.client, 24 * kMiB + 7);
  std::vector<std::unique_ptr<Link>> links;
  std::vector<Link*> all;
  for (int i = 0; i < 3; ++i) links.push_back(connect(h.port(), token('a'))), all.push_back(links.back().get());
  const Pinned p = links[0]->pin({id}, kMinute, "", false).at(0);
  std::vector<std::byte> into;
  for (const size_t streams : {1, 3}) {
    const Piece one = piece(p, &into);
    const Piece halves[] = {{one.region, one.offset, one.local, 5 * kMiB + 1},
                            {one.region, one.offset + 5 * kMiB + 1, one.local + 5 * kMiB + 1, one.bytes - 5 * kMiB - 1}};
    uint64_t before = 0;
    int calls = 0;
    const std::thread::id me = std::this_thread::get_id();
    Reached reached{[&](uint64_t n) {
                      CHECK(std::this_thread::get_id() == me && n >= before + 3 * kMiB && n <= p.size);
                      for (uint64_t i = before; i < n; ++i) CHECK(into[i] == pattern(id, i));
                      before = n;
                      ++calls;
                      return true;
                    },
                    3 * kMiB};
    CHECK(read_striped({all.begin(), all.begin() + long(streams)}, halves, kMinute, &reached));
    CHECK(intact(into, id));
    CHECK(calls <= 8);
    calls = 0;
    into.assign(p.size, std::byte{0xa5});
    reached.tell = [&](uint64_t) { return ++calls < 2; };
    reached.step = 1;
    const bool whole = read_striped({all.begin(), all.begin() + long(streams)}, halves, kMinute, &reached);
    CHECK(whole == (calls < 2));
    for (Link* l : all) CHECK(l->describe(kMinute).empty());  // in order
  }
  links[0]->close();
  const Piece one = piece(p, &into);
  const Reached never{[](uint64_t) { return true; }};
  CHECK(failure([&] { read_striped(all, {&one, 1}, kMinute, &never); }).kind == PeerError::kLost);
  CHECK(links[1]->unpin({id}, kMinute, false));
}

// All of an object is asked for at once, while it is still coming.
TEST(what_is_on_its_way_is_waited_for) {
  Home h;
  auto one = connect(h.port(), token('a')), two = connect(h.port(), token('a')), other = connect(h.port(), token('b'));
  for (const bool sealed : {true, false}) {
    const ObjectId id = h.client->new_id();
    std::byte* where;
    Client::Place at;
    CHECK_EQ(h.served->create(id, 12 * kMiB, -1, &where, {}, &at).status, Status::kOk);
    std::memset(where, 0, 12 * kMiB);
    h.server->offer(id, at, 12 * kMiB);
    const Pinned p = one->pin({id}, kMinute, "", false).at(0);
    CHECK(p.size == 12 * kMiB && p.available == 0);
    std::vector<std::byte> into;
    const Piece all = piece(p, &into);
    std::atomic<uint64_t> there{0}, seen{0};
    std::thread reader([&] {
      const Reached reached{[&](uint64_t n) {
                              CHECK(n <= there || !sealed);
                              if (n > there) return false;  // it was given up
                              CHECK(two->wait(id, n - 1, kMinute) >= n);
                              seen = n;
                              return true;
                            },
                            1};
      read_striped({one.get(), other.get()}, {&all, 1}, kMinute, &reached);
    });
    for (int i = 1; i < 12; ++i) {
      for (size_t k = size_t(i - 1) * kMiB; k < i * kMiB; ++k) where[k] = pattern(id, k);
      there = i * kMiB;
      h.server->progress(id, there);
      if (i % 4 == 0) UNTIL(seen == there);
      if (i == 6) {  // of those bytes that have come, others read whatever waits
        std::byte some[100];
        const Piece few{p.region, p.offset + 6 * kMiB - 100, reinterpret_cast<uint64_t>(some), 100};
        two->read({&few, 1}, kMinute);
        CHECK(some[99] == pattern(id, 6 * kMiB - 1));
      }
    }
    UNTIL(seen == 11 * kMiB);
    if (sealed) {
      for (size_t k = 11 * kMiB; k < 12 * kMiB; ++k) where[k] = pattern(id, k);
      there = 12 * kMiB;
      CHECK_EQ(h.served->seal(id, self(id), false, {}), Status::kOk);
    }
    h.server->retract(id);
    reader.join();
    if (sealed) CHECK(intact(into, id));
    else h.served->abort(id);
    CHECK_EQ(one->unpin({id}, kMinute, false), sealed);
  }
}

// With good ranges around the bad one, in frames before and after it.
TEST(a_range_that_is_not_there) {
  Home h;
  const ObjectId id = put(*h.client, 24 * kMiB);
  auto one = connect(h.port(), token('a')), two = connect(h.port(), token('a'));
  std::vector<std::byte> into;
  std::byte spare[16];
  const Pinned p = one->pin({id}, kMinute, "", false).at(0);
  for (const Piece& bad : {Piece{0, 48 * kMiB - 8, 0, 16}, Piece{9, 0, 0, 16}, Piece{kCopies + 99, 0, 0, 16}, Piece{0, UINT64_MAX - 8, 0, 16}}) {
    check::context = "region " + std::to_string(bad.region);
    const Piece all = piece(p, &into);
    Piece pieces[] = {all, bad, all};
    pieces[0].bytes = 12 * kMiB - 100;
    pieces[1].local = reinterpret_cast<uint64_t>(spare);
    pieces[2].offset += pieces[0].bytes, pieces[2].local += pieces[0].bytes, pieces[2].bytes -= pieces[0].bytes;
    for (int links = 1; links <= 2; ++links) {
      const PeerError e = failure([&] { read_striped(links == 1 ? std::vector{one.get()} : std::vector{one.get(), two.get()}, pieces, kMinute); });
      CHECK(e.kind == PeerError::kOther && e.error == EINVAL);
      CHECK(std::string(e.what()).find("[" + std::to_string(bad.offset)) != std::string::npos);
      CHECK(!one->closed() && !two->closed());
      into.assign(p.size, std::byte{0xa5});
      read_striped({one.get(), two.get()}, {&all, 1}, kMinute);
      CHECK(intact(into, id));
    }
  }
  CHECK(one->unpin({id}, kMinute, false));
}

// Without a copy, or so meant: on the way to this machine itself the kernel copies, says so, and is asked no more.
TEST(memory_is_lent_where_that_is_of_use) {
  using enum Server::Options::ZeroCopy;
  for (const auto how : {kNever, kWhereItIs, kAlways}) {
    check::context = "how " + std::to_string(int(how));
    Home h({.zero_copy = how});
    const ObjectId id = put(*h.client, 9 * kMiB + 5);
    auto link = connect(h.port(), token('a'));
    const Pinned p = link->pin({id}, kMinute, "", false).at(0);
    std::vector<std::byte> into;
    auto lent_by_a_read = [&] {
      const uint64_t before = h.server->stats().bytes_lent;
      const Piece all = piece(p, &into);
      // In ranges of all sizes, the small ones between the large.
      std::vector<Piece> pieces;
      for (uint64_t at = 0, n = 1; at < all.bytes; at += n, n = pieces.size() % 3 ? 300'000 + at % 1000 : 1 + at % 50'000)
        pieces.push_back({all.region, all.offset + at, all.local + at, std::min(n, all.bytes - at)});
      link->read(pieces, kMinute);
      CHECK(intact(into, id));
      return h.server->stats().bytes_lent - before;
    };
    const uint64_t first = lent_by_a_read();
    if (how == kNever) CHECK_EQ(first, 0u);
    else CHECK(first >= 32 << 10);
    if (how == kWhereItIs) UNTIL(lent_by_a_read() == 0);
    if (how == kAlways)
      for (int i = 0; i < 10; ++i) CHECK(lent_by_a_read() >= 8 * kMiB);
    CHECK(link->unpin({id}, kMinute, false));
    link.reset();
    h.expect_nobody();
  }
}

TEST(many_at_once) {
  Home h({.threads = 3, .zero_copy = Server::Options::ZeroCopy::kAlways});
  std::vector<ObjectId> ids;
  for (size_t n : {10, 5000, 70'000, 300'000, 1'500'000, 6'000'000}) ids.push_back(put(*h.client, n));
  std::atomic<int> running{6};
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t)
    threads.emplace_back([&, t] {
      auto one = connect(h.port(), token(char('a' + t % 2))), two = connect(h.port(), token(char('a' + t % 2)));
      std::vector<std::byte> into;
      for (int i = 0; i < 40; ++i) {
        const ObjectId id = ids[size_t(i * 7 + t) % ids.size()];
        const Pinned p = one->pin({id}, kMinute, "", false).at(0);
        CHECK(p.code == Code::kOk);
        const Piece all = piece(p, &into);
        if (i % 3) two->read({&all, 1}, kMinute);
        else read_striped({one.get(), two.get()}, {&all, 1}, kMinute);
        CHECK(intact(into, id));
        CHECK(one->unpin({id}, kMinute, i % 5 == 0));
      }
      --running;
    });
  const ObjectId offered = h.client->new_id();
  std::byte* where;
  while (running) {  // what the node says meanwhile
    Client::Place at;
    CHECK_EQ(h.served->create(offered, kMiB, -1, &where, {}, &at).status, Status::kOk);
    h.server->offer(offered, at, kMiB);
    h.server->progress(offered, 1000);
    h.server->describe("text");
    h.server->stats();
    h.server->gone(ids[0]);
    h.server->retract(offered);
    h.served->abort(offered);
    UNTIL(is_missing(*h.client, offered));
  }
  for (std::thread& t : threads) t.join();
  h.expect_nobody();
  h.expect_nothing();
}

TEST(closing_ends_everything) {
  for (int round = 0; round < 5; ++round) {
    Home h({.threads = unsigned(1 + round), .zero_copy = round % 2 ? Server::Options::ZeroCopy::kAlways : Server::Options::ZeroCopy::kWhereItIs});
    const ObjectId id = put(*h.client, 6'000'000);
    const ObjectId offered = h.client->new_id();
    std::byte* where;
    Client::Place at;
    CHECK_EQ(h.served->create(offered, kMiB, -1, &where, {}, &at).status, Status::kOk);
    h.server->offer(offered, at, kMiB);
    std::atomic<int> started{0}, done{0}, ended{0};
    std::vector<std::thread> threads;
    auto each = [&](auto f) {
      threads.emplace_back([&, f] {
        const int mine = started++;
        try {
          auto link = connect(h.port(), token(char('a' + mine % 3)), mine == 0);
          for (;; ++done) f(*link);
        } catch (const PeerError& e) {
          if (e.kind != PeerError::kLost) check::fail(__FILE__, __LINE__, e.what());
          ++ended;
        }
      });
    };
    each([&](Link& l) {
      ObjectId gone;
      l.next_event(kMinute, &gone);
    });
    UNTIL(started == 1);
    for (int i = 0; i < 3; ++i)
      each([&](Link& l) {
        std::vector<std::byte> into;
        const Piece all = piece(l.pin({id}, kMinute, "", false).at(0), &into);
        l.read({&all, 1}, kMinute);
        CHECK(intact(into, id));
        CHECK(l.unpin({id}, kMinute, true));
      });
    each([&](Link& l) {
      CHECK(l.pin({offered}, kMinute, "", false).at(0).available == 0);
      l.wait(offered, 0, kMinute);
    });
    each([&](Link& l) {
      const Pinned p = l.pin({offered}, kMinute, "", false).at(0);
      std::vector<std::byte> into;
      const Piece all = piece(p, &into);
      l.read({&all, 1}, kMinute);
    });
    each([&](Link& l) { l.exchange("nobody", "answers", kMinute); });
    each([&](Link& l) { l.describe(kMinute); });
    std::atomic<bool> over{false};
    threads.emplace_back([&] {  // connections come and go
      while (!over) {
        Raw(h.port()).prove(token('z'));
      }
    });
    UNTIL(done >= 20 + 10 * round);
    over = true;
    threads.back().join();
    threads.pop_back();
    h.server->close();
    h.server->close();
    for (std::thread& t : threads) t.join();
    CHECK_EQ(ended.load(), int(threads.size()));
    const Server::Stats s = h.server->stats();
    CHECK(s.connections == 0 && s.sessions == 0 && s.pins == 0 && s.replicas == 0);
    h.server->gone(id);
    h.server->retract(offered);
    Link::Options o;
    o.session = token('a');
    CHECK(failure([&] { Link::connect("127.0.0.1", h.port(), kSecret, o); }).error == ECONNREFUSED);
    h.served->abort(offered);
    h.expect_nothing();
  }
}

}  // namespace

int main(int argc, char** argv) { return harness::main(argc, argv); }
