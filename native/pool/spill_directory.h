// The directory of one pool's spill file and journal. Whoever holds its lock is the pool's broker.
//
// It is removed when its broker ends. When that was killed, it stays as long as a process lives that has objects in it, for the broker which
// that process will start; its broker's janitor (`clean_up`), and those of the user's later brokers, remove it after that.
#pragma once
#include <sys/types.h>

#include <string>

#include "unix.h"

namespace mcr {

class SpillDirectory {
 public:
  explicit SpillDirectory(std::string path) : path_(std::move(path)) {}

  bool exists() const;  // something was left there
  void take();          // makes it, and locks it. Throws std::system_error, std::runtime_error
  bool taken() const { return bool(lock_); }
  void remove();        // with all that is in it, and the lock
  const std::string& path() const { return path_; }
  std::string data() const { return path_ + "/data"; }
  std::string journal() const { return path_ + "/journal"; }

  // Removes what nobody needs any more among the directories beside this one.
  void sweep_siblings() const;

 private:
  std::string path_;
  Fd lock_;
};

// What a janitor does: removes what was left beside the directory, waits for its broker to end, and removes it once nobody needs it.
void clean_up(const std::string& path, pid_t broker);

// When a process began, in clock ticks since the machine did: with its pid, names it for good. 0: there is no such process.
uint64_t process_start(pid_t pid);

}  // namespace mcr
