// Both ends of RDMA in one process, under the sanitizers. Where there is no device (which MOONCAKE_RDMA_REQUIRED=1 forbids) there is
// nothing to test.
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <random>

#include "check.h"
#include "verbs/reader.h"

using namespace mcr::verbs;

namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr int64_t kSecond = 1'000'000'000;
constexpr uint64_t kRegion = 11;
std::string device;

struct Pages {
  explicit Pages(size_t bytes) : bytes(bytes) {
    data = static_cast<unsigned char*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(data != MAP_FAILED);
  }
  ~Pages() { ::munmap(data, bytes); }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data); }
  size_t bytes;
  unsigned char* data;
};

FarPort far(const Port& p) { return {p.ethernet, p.lid, p.gid, p.mtu, p.reads_out, p.reads_in}; }

// The first address of RoCE over IPv4 is at index 1 here.
std::shared_ptr<Rails> open() { return Rails::open({{device, 1, 1}}); }

struct Pair {
  explicit Pair(size_t bytes, size_t queues = 2, uint32_t twist = 0, Manner manner = {})
      : source(bytes), target(bytes), there(open()), here(open()), piece{source.address(), bytes, there->add(source.address(), bytes)} {
    for (size_t i = 0; i < bytes; ++i) source.data[i] = static_cast<unsigned char>(i * 7 + (i >> 12));
    here->add(target.address(), bytes);
    piece.keys[0] ^= twist;
    responder = std::make_unique<Responder>(there, std::vector<size_t>(queues));
    reader = std::make_unique<Reader>(here, std::vector<size_t>(queues), manner);
    for (size_t i = 0; i < queues; ++i) {
      responder->connect(i, far((*here)[0].port), reader->ends()[i], manner);
      reader->connect(i, far((*there)[0].port), responder->ends()[i], 0);
    }
    reader->set_regions({{kRegion, Region{piece.address, bytes, {piece}}}});
  }
  void read(uint64_t offset, uint64_t to, uint64_t bytes, int64_t timeout = 60 * kSecond, bool (*interrupted)() = nullptr) {
    const Range r{kRegion, offset, target.address() + to, bytes};
    reader->read({&r, 1}, timeout, interrupted);
  }
  Pages source, target;
  std::shared_ptr<Rails> there, here;
  Piece piece;
  std::unique_ptr<Responder> responder;
  std::unique_ptr<Reader> reader;
};

template <class F>
Error failure(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e;
  }
  check::fail(__FILE__, __LINE__, "did not fail");
}

TEST(reads) {
  Pair p(2 * kMiB);
  p.read(0, 0, p.source.bytes);
  CHECK(!std::memcmp(p.source.data, p.target.data, p.source.bytes));
  std::memset(p.target.data, 0xa5, p.target.bytes);
  std::vector<Range> ranges;
  for (uint64_t i = 0; i < 500; ++i) ranges.push_back({kRegion, i * 1501, p.target.address() + i * 999, 700});
  p.reader->read(ranges, 60 * kSecond, nullptr);
  for (uint64_t i = 0; i < 500; ++i) {
    CHECK(!std::memcmp(p.target.data + i * 999, p.source.data + i * 1501, 700));
    for (uint64_t k = 700; k < 999; ++k) CHECK(p.target.data[i * 999 + k] == 0xa5);
  }
  uint64_t total = 0;
  for (const uint64_t n : p.reader->bytes_read()) total += n;
  CHECK_EQ(total, p.source.bytes + 500 * 700);
  CHECK_EQ(failure([&] { p.read(p.source.bytes, 0, 1); }).code, EINVAL);
  p.read(5, 5, 100);  // a wrong range is not the end
}

TEST(a_wrong_key) {
  Pair p(kMiB, 2, 0xff);
  const Error e = failure([&] { p.read(0, 0, kMiB); });
  CHECK(e.failure == Failure::kTransport && e.code == EREMOTEIO);
  CHECK_EQ(failure([&] { p.read(0, 0, 10); }).code, EBADF);
}

TEST(a_peer_that_is_gone) {
  Pair p(kMiB, 2, 0, Manner{.timeout = 16, .retries = 2});
  p.responder.reset();
  CHECK(failure([&] { p.read(0, 0, kMiB); }).failure == Failure::kPeerLost);
}

TEST(a_deadline) {
  Pair p(kMiB, 2, 0, Manner{.timeout = 20});
  p.responder.reset();
  CHECK_EQ(failure([&] { p.read(0, 0, kMiB, kSecond / 4); }).code, ETIMEDOUT);
  CHECK_EQ(failure([&] { p.read(0, 0, kMiB); }).code, EBADF);
}

TEST(an_interruption) {
  Pair p(kMiB, 2, 0, Manner{.timeout = 20});
  p.responder.reset();
  static int left;
  left = 3;
  bool thrown = false;
  try {
    p.read(0, 0, kMiB, 60 * kSecond, [] { return --left <= 0; });
  } catch (const Interrupted&) {
    thrown = true;
  }
  CHECK(thrown);
}

TEST(threads_take_turns_until_it_is_closed) {
  Pair p(kMiB);
  std::atomic<int> ended{0}, done{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      try {
        for (;;) {
          p.read(t * 1000, t * 200'000, 150'000);
          ++done;
        }
      } catch (const Error& e) {
        CHECK(e.code == ECANCELED || e.code == EBADF);
        ++ended;
      }
    });
  UNTIL(done >= 8);
  p.reader->close();
  std::memset(p.target.data, 0, p.target.bytes);
  for (std::thread& t : threads) t.join();
  CHECK_EQ(ended.load(), 4);
  for (size_t i = 0; i < p.target.bytes; ++i) CHECK(p.target.data[i] == 0);
}

TEST(registrations) {
  const auto rails = open();
  Pages pages(4 * kMiB);
  CHECK_EQ(rails->add(pages.address() + kMiB, kMiB).size(), 1u);
  using AtBytes = std::pair<uint64_t, uint64_t>;
  for (const auto& [at, n] : {AtBytes{kMiB, kMiB}, {0, kMiB + 1}, {2 * kMiB - 1, 5}, {0, 4 * kMiB}, {kMiB + 5, 1}, {0, 0}})
    CHECK(failure([&] { rails->add(pages.address() + at, n); }).failure == Failure::kRegistration);
  rails->add(pages.address() + 2 * kMiB, kMiB);
  rails->add(pages.address(), kMiB);
  const auto pieces = rails->pieces();
  CHECK_EQ(pieces->size(), 3u);
  for (size_t i = 0; i < 3; ++i) CHECK_EQ((*pieces)[i].address, pages.address() + i * kMiB);
}

TEST(devices_that_are_not_there) {
  CHECK(failure([] { Rails::open({{"nothing", 1, 1}}); }).failure == Failure::kUnavailable);
  CHECK(failure([] { Rails::open({{device, 9, 1}}); }).failure == Failure::kUnavailable);
}

}  // namespace

int main() {
  std::string why = "no RDMA device";
  try {
    const auto names = device_names();
    if (!names.empty()) device = names.front();
  } catch (const Error& e) {
    why = e.what();
  }
  if (!device.empty()) return check::run();
  const char* required = std::getenv("MOONCAKE_RDMA_REQUIRED");
  std::printf("%s\n", why.c_str());
  return required && std::string(required) == "1" ? 1 : 77;
}
