// What one puller has of a peer server, over all its connections: pins, replicas, questions.
#pragma once
#include <deque>
#include <set>
#include <string>
#include <unordered_map>

#include "loop.h"
#include "pool/client.h"

namespace mcr::peer {

struct Target {
  Loop* loop = nullptr;
  uint64_t conn = 0;
};

struct Session {
  struct Pin {
    std::shared_ptr<View> view;  // null: of an offer, which may end badly
    Client::Place at;
    uint64_t region = 0, bytes = 0;
    uint32_t count = 0;
    bool lost = false;
  };
  std::string token, me;
  uint64_t number = 0;
  size_t connections = 0;
  bool over = false;
  std::unordered_map<ObjectId, Pin> pins;
  std::unordered_map<uint64_t, std::shared_ptr<View>> copies;  // by region: what is in no arena
  std::set<ObjectId> replicas, pulling;
  std::vector<Target> events;
  std::deque<Target> asking;  // exchanges without an answer, in order
};

}  // namespace mcr::peer
