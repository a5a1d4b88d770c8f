// The spill file and its threads: contents, holes, errors, and an end at any time.
#include "pool/spill_file.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <fstream>
#include <map>
#include <memory>
#include <random>

#include "temporary.h"

using namespace mcr;
using Job = SpillFile::Job;

namespace {

constexpr uint64_t kMiB = 1 << 20;

struct Pages {  // page-aligned memory
  explicit Pages(uint64_t bytes) : map(-1, 0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS) {}
  std::byte* data() { return map.data(); }
  void fill(uint64_t seed, uint64_t bytes) {
    std::mt19937_64 rng(seed);
    for (uint64_t i = 0; i + 8 <= bytes; i += 8) {
      const uint64_t r = rng();
      std::memcpy(data() + i, &r, 8);
    }
  }
  Mapping map;
};

// All that is under way, by the number that it has instead of an object's.
struct Waiter {
  SpillFile& file;
  std::map<uint64_t, std::string> finished;
  uint64_t next = 1;
  uint64_t submit(Job::Kind kind, std::byte* memory, uint64_t offset, uint64_t bytes) {
    file.submit({kind, {0, next}, memory, offset, bytes, {}});
    return next++;
  }
  std::string wait(uint64_t which) {
    while (!finished.contains(which)) {
      pollfd p{file.done_fd(), POLLIN, 0};
      CHECK(::poll(&p, 1, 60'000) == 1);
      for (Job& j : file.done()) CHECK(finished.emplace(j.id.lo, j.error).second);
    }
    return finished[which];
  }
  std::string write(std::byte* memory, uint64_t offset, uint64_t bytes) { return wait(submit(Job::kWrite, memory, offset, bytes)); }
  std::string read(std::byte* memory, uint64_t offset, uint64_t bytes) { return wait(submit(Job::kRead, memory, offset, bytes)); }
};

uint64_t blocks(const std::string& path) {
  struct stat st;
  CHECK(!::stat(path.c_str(), &st));
  return uint64_t(st.st_blocks) * 512;
}

// Random extents against a model of the file, many jobs at a time. Extents under way do not overlap, as with the table.
void random_extents(const std::string& path, uint64_t seed, int steps) {
  constexpr uint64_t kSlots = 24, kSlot = 64;  // of so many pages
  std::mt19937_64 rng(seed);
  SpillFile file(path, 0);
  Waiter w{file, {}, 1};
  Pages memory(kSlots * kSlot * kPageSize);
  struct Slot {
    uint64_t seed = 0, bytes = 0, job = 0;
    bool reading = false;
  };
  std::vector<Slot> slots(kSlots);
  auto place = [](size_t i) { return i * kSlot * kPageSize; };
  auto settle = [&](size_t i) {
    Slot& s = slots[i];
    if (!s.job) return;
    CHECK_EQ(w.wait(std::exchange(s.job, 0)), "");
    if (!s.reading) return;
    Pages expected(s.bytes);
    expected.fill(s.seed, s.bytes);
    CHECK(!std::memcmp(memory.data() + place(i), expected.data(), s.bytes));
  };
  for (int n = 0; n < steps; ++n) {
    const size_t i = rng() % kSlots;
    Slot& s = slots[i];
    settle(i);
    std::byte* at = memory.data() + place(i);
    switch (s.bytes ? rng() % 3 : 0) {
      case 0: {
        if (s.bytes) w.submit(Job::kPunch, nullptr, place(i), s.bytes);
        s = {rng(), (1 + rng() % kSlot) * kPageSize, 0, false};
        Pages fresh(s.bytes);
        fresh.fill(s.seed, s.bytes);
        std::memcpy(at, fresh.data(), s.bytes);
        s.job = w.submit(Job::kWrite, at, place(i), s.bytes);
        break;
      }
      case 1:
        std::memset(at, 0, s.bytes);
        s.reading = true;
        s.job = w.submit(Job::kRead, at, place(i), s.bytes);
        break;
      case 2:
        w.submit(Job::kPunch, nullptr, place(i), s.bytes);  // what is written there next comes after it
        s = {};
        break;
    }
  }
  for (size_t i = 0; i < kSlots; ++i) {
    settle(i);
    if (!slots[i].bytes) continue;
    slots[i].reading = true;
    std::memset(memory.data() + place(i), 0, slots[i].bytes);
    slots[i].job = w.submit(Job::kRead, memory.data() + place(i), place(i), slots[i].bytes);
    settle(i);
    // And for whoever reads on its own.
    Pages own(slots[i].bytes);
    CHECK_EQ(read_fully(file.read_fd(), own.data(), slots[i].bytes, place(i)), "");
    CHECK(!std::memcmp(own.data(), memory.data() + place(i), slots[i].bytes));
    w.submit(Job::kPunch, nullptr, place(i), slots[i].bytes);
  }
  UNTIL(blocks(path) == 0);  // all of it is a hole now
}

TEST(random_extents_on_the_disk) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Temporary dir;
    check::context = "seed " + std::to_string(seed);
    random_extents(dir / "data", seed, 300);
  }
}

TEST(random_extents_in_memory_that_is_a_file_system)  {  // without direct access, before Linux 6.6
  Temporary dir;
  if (!dir.mount(64 * kMiB)) return;
  random_extents(dir / "data", 1, 300);
}

TEST(a_file_keeps_what_it_has_when_it_is_opened_again_and_is_cut) {
  Temporary dir;
  const std::string path = dir / "data";
  Pages a(kMiB), b(kMiB);
  a.fill(1, kMiB);
  {
    SpillFile file(path, 0);
    Waiter w{file, {}, 1};
    CHECK_EQ(w.write(a.data(), 0, kMiB), "");
    CHECK_EQ(w.write(a.data(), 4 * kMiB, kMiB), "");
  }
  SpillFile file(path, 0);
  Waiter w{file, {}, 1};
  CHECK_EQ(w.read(b.data(), 4 * kMiB, kMiB), "");
  CHECK(!std::memcmp(a.data(), b.data(), kMiB));
  file.truncate(100 * kMiB);
  CHECK_EQ(std::filesystem::file_size(path), 5 * kMiB);
  file.truncate(kMiB);
  CHECK_EQ(std::filesystem::file_size(path), kMiB);
  CHECK_EQ(w.read(b.data(), 0, kMiB), "");
  CHECK(!std::memcmp(a.data(), b.data(), kMiB));
  CHECK_EQ(w.read(b.data(), 4 * kMiB, kMiB), "read: the file ends early (" + path + ")");
}

TEST(a_full_file_system_is_an_error_that_names_the_file) {
  Temporary dir;
  if (!dir.mount(4 * kMiB)) return;
  const std::string path = dir / "data";
  Pages a(kMiB), b(8 * kMiB);
  a.fill(1, kMiB), b.fill(2, 8 * kMiB);
  SpillFile file(path, 0);
  Waiter w{file, {}, 1};
  CHECK_EQ(w.write(a.data(), 0, kMiB), "");
  CHECK_EQ(w.write(b.data(), kMiB, 8 * kMiB), "write: the disk is all but full (" + path + ")");  // seen beforehand
  // And where statvfs promises more than the disk holds: the write tells, as does what else fails.
  CHECK_EQ(write_fully(file.read_fd(), a.data(), 1, 0), std::string("write: ") + std::strerror(EBADF));
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  CHECK_EQ(write_fully(full, a.data(), 100, 0), std::string("write: ") + std::strerror(ENOSPC));
  ::close(full);
  Pages c(kMiB);
  CHECK_EQ(w.read(c.data(), 0, kMiB), "");
  CHECK(!std::memcmp(a.data(), c.data(), kMiB));
  CHECK_EQ(w.write(b.data(), kMiB, kMiB), "");  // a smaller one still fits
}

TEST(a_part_of_the_disk_is_left_alone) {
  Temporary dir;
  if (!dir.mount(16 * kMiB)) return;
  Pages a(4 * kMiB);
  SpillFile file(dir / "data", 0.5);
  Waiter w{file, {}, 1};
  CHECK_EQ(w.write(a.data(), 0, 4 * kMiB), "");
  CHECK(w.write(a.data(), 4 * kMiB, 4 * kMiB + kPageSize).find("all but full") != std::string::npos);
  CHECK_EQ(w.write(a.data(), 4 * kMiB, 3 * kMiB), "");
}

TEST(jobs_that_have_not_begun_are_dropped_at_the_end) {
  for (int i = 0; i < 20; ++i) {
    Temporary dir;
    Pages a(kMiB);
    SpillFile file(dir / "data", 0);
    for (uint64_t n = 0; n < 50; ++n) {
      file.submit({Job::kWrite, {0, n}, a.data(), n * kMiB, kMiB, {}});
      file.submit({Job::kRead, {1, n}, nullptr, 1000 * kMiB, kMiB, {}});  // beyond the end: its memory is not touched
      file.submit({Job::kPunch, {}, nullptr, n * kMiB, kMiB, {}});
    }
  }
}

TEST(reads_do_not_wait_behind_writes) {
  Temporary dir;
  Pages a(32 * kMiB), b(kPageSize);
  SpillFile file(dir / "data", 0);
  Waiter w{file, {}, 1};
  CHECK_EQ(w.write(a.data(), 0, kPageSize), "");
  std::vector<uint64_t> writes;
  for (uint64_t n = 0; n < 8; ++n) writes.push_back(w.submit(Job::kWrite, a.data(), n * 32 * kMiB, 32 * kMiB));
  CHECK_EQ(w.read(b.data(), 0, kPageSize), "");
  CHECK(!w.finished.contains(writes.back()));
  for (uint64_t n : writes) CHECK_EQ(w.wait(n), "");
}

TEST(a_file_that_cannot_be_opened) {
  Temporary dir;
  for (const std::string& path : {dir / "no such directory/data", dir / "."}) {
    std::string why;
    try {
      SpillFile file(path, 0);
    } catch (const std::system_error& e) {
      why = e.what();
    }
    CHECK(why.find(path) == 0);
  }
  { std::ofstream(dir / "short") << "x"; }
  Pages a(kPageSize);
  SpillFile file(dir / "short", 0);
  Waiter w{file, {}, 1};
  CHECK(w.read(a.data(), kMiB, kPageSize).find("the file ends early") != std::string::npos);
}

}  // namespace

int main() { return check::run(); }
