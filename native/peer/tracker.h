// From whom a puller reads a large object: the home itself, or a puller before it. No I/O, no clock, not thread-safe.
//
// The least loaded source is given; where several are, one that has all of it before one that is still receiving. A puller is a source as soon
// as it has been given one, so that n pullers who come at once form a chain. No chain leads back to the puller itself.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>

#include "pool/wire.h"

namespace mcr::peer {

class Tracker {
 public:
  // The source for `me` ("": the home). `bad`, if not empty, failed: nobody is sent there for this object before it pulls anew.
  std::string assign(ObjectId id, const std::string& me, const std::string& bad);
  // The pull is over. `kept`: `me` has all of it, and others may read it there.
  void finish(ObjectId id, const std::string& me, bool kept);
  void gone(ObjectId id) { objects_.erase(id); }    // the object ceased to exist
  void forget(const std::string& who);             // that peer is not there any more
  uint32_t load(ObjectId id, const std::string& source) const;
  size_t size() const { return objects_.size(); }

 private:
  struct Holder {
    bool complete = false;
    uint32_t load = 0;   // pullers that read from it now
    bool pulling = false;
    std::string from;    // while pulling
  };
  struct Object {
    Object() { holders[""].complete = true; }
    std::map<std::string, Holder> holders;
  };
  static bool leads_to(const Object& o, const std::string& source, const std::string& me);
  static void let_go(Object& o, Holder& h);
  static void drop(Object& o, const std::string& who);
  std::unordered_map<ObjectId, Object> objects_;
};

}  // namespace mcr::peer
