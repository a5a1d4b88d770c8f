// A directory that goes with its scope, and a file system of its own size in it.
#pragma once
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "check.h"

class Temporary {
 public:
  Temporary() { CHECK(::mkdtemp(path_)); }
  Temporary(const Temporary&) = delete;
  ~Temporary() {
    if (mounted_) ::umount2(path_, MNT_DETACH);
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return std::string(path_) + "/" + name; }
  const char* path() const { return path_; }
  // Puts a tmpfs of that many bytes there. False, and says so, where this process may not.
  bool mount(unsigned long bytes) {
    const std::string options = "mode=0700,size=" + std::to_string(bytes);
    mounted_ = !::mount("tmpfs", path_, "tmpfs", 0, options.c_str());
    if (!mounted_) std::printf("  skipped: no tmpfs can be mounted here: %s\n", std::strerror(errno));
    return mounted_;
  }

 private:
  char path_[64] = "/tmp/mooncake_ray_test_XXXXXX";
  bool mounted_ = false;
};
