// What a broker leaves behind for the next one, should it be killed: a log of the sessions, the claims, and the objects on disk.
//
// Records follow one another in a file; each has its length and a CRC-32, so that a torn one ends the log. The last record of a name
// counts. Nothing is synced: the log outlives its process, not the machine, with which everybody who could ask is gone too.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "table.h"
#include "unix.h"

namespace mcr {

class Journal {
 public:
  struct Contents {
    uint8_t pool_id[16] = {};
    uint64_t generation = 0;
    std::vector<SavedSession> sessions;
    std::vector<SavedObject> objects;
    std::vector<SavedClaim> claims;
  };

  // What the log at `path` says. Throws std::system_error where it cannot be read, std::runtime_error where it is none of ours.
  static Contents read(const std::string& path);

  // Begins a new log in place of the one at `path`, if any, which stays until the new one is complete (`commit`).
  Journal(std::string path, const uint8_t (&pool_id)[16], uint64_t generation);

  void put(const SavedSession& s);
  void put(const SavedObject& o);
  void put(const SavedClaim& c);
  void forget(SessionId s);
  void forget(ObjectId id);
  void forget(const ClaimKey& key);
  void write();   // what was put since the last time. Throws std::system_error
  void commit();  // writes, and takes the place of the old log
  bool overgrown() const;  // it is time for a new one

 private:
  std::string path_;
  Fd fd_;
  std::string pending_;
  uint64_t written_ = 0, begun_with_ = 0;  // bytes; of these, before the commit
};

}  // namespace mcr
