// The file that objects are spilled to, in a directory of its own, and the two threads that write and read it.
//
// Extents are page-aligned and go past the page cache where the file system lets them. What is freed is punched out. Thread-safe between
// its owner (one thread) and its own two.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "unix.h"
#include "wire.h"

namespace mcr {

class SpillFile {
 public:
  struct Job {
    enum Kind { kWrite, kRead, kPunch } kind;
    ObjectId id;
    std::byte* memory = nullptr;
    uint64_t offset = 0, bytes = 0;
    std::string error;  // when it is done: "" or what went wrong
  };

  // Opens or makes `path`; what is there stays. Throws std::system_error. Leaves the room it finds on the disk alone beyond the last
  // `reserve` part of it (0.05: never fills the disk to more than 95 %).
  SpillFile(const std::string& path, double reserve);
  ~SpillFile();  // jobs that have not begun are dropped
  SpillFile(const SpillFile&) = delete;

  void submit(Job job);  // its memory must stay until it is done; a punch does not report
  void truncate(uint64_t bytes);  // to no more than that; before anything is submitted
  int done_fd() const { return event_.get(); }  // readable (eventfd) when something is done
  std::vector<Job> done();
  int read_fd() const { return reader_fd_.get(); }  // for whoever reads on its own; page-aligned reads into page-aligned memory
  bool direct() const { return direct_; }

 private:
  struct Lane {  // a thread with a queue; reads do not wait behind writes
    std::mutex mutex;
    std::condition_variable_any wake;
    std::deque<Job> jobs;
    std::jthread thread;
  };
  void serve(Lane& lane, std::stop_token stop);
  void run(Job& job);
  std::string disk_is_full(uint64_t bytes) const;

  const std::string path_;
  const double reserve_;
  Fd writer_fd_, reader_fd_, event_;
  bool direct_ = false;
  std::mutex done_mutex_;
  std::vector<Job> done_;
  Lane writes_, reads_;  // last: their threads use the rest
};

// Reads or writes all of it; "" or what went wrong.
std::string write_fully(int fd, const std::byte* from, uint64_t bytes, uint64_t offset);
std::string read_fully(int fd, std::byte* to, uint64_t bytes, uint64_t offset);

}  // namespace mcr
