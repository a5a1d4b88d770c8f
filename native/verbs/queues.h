// Queue pairs: those that answer a peer's reads, and how either kind is led to its peer.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "rails.h"

namespace mcr::verbs {

// One end of a connected pair.
struct End {
  uint32_t number = 0, first_packet = 0;
};

// What must be known of the port at the far end.
struct FarPort {
  bool ethernet = false;
  uint16_t lid = 0;
  Gid gid{};
  int mtu = 0;
  uint32_t reads_out = 0, reads_in = 0;
};

// How patient a queue pair is, and how its packets are marked.
struct Manner {
  uint8_t timeout = 16;  // 4.096 us * 2^timeout: how long an answer may take before it is asked for again
  uint8_t retries = 6;   // how often it is; 7 would be for ever with some devices
  uint8_t traffic_class = 0, service_level = 0;
};

uint32_t reads_under_way(const Port& asks, const FarPort& answers);
uint32_t reads_under_way(const FarPort& asks, const Port& answers);

QueuePtr make_queue(const Rail& rail, ibv_cq* completions, uint32_t requests);
End new_end(const ibv_qp& queue);  // with a first packet number at random
// Ready to answer that peer, and nobody else. `access`: what the peer may do. Throws Error.
void to_receive(const Rail& rail, ibv_qp* queue, const FarPort& far, End end, uint32_t reads, unsigned access, const Manner& manner);
// And to ask it.
void to_send(const Rail& rail, ibv_qp* queue, End mine, uint32_t reads, const Manner& manner);

// The end of a connection whose memory is read: its queue pairs can answer reads, and do nothing else. For one thread at a time.
class Responder {
 public:
  // `rails`: for each queue pair, the rail that it is on.
  Responder(std::shared_ptr<Rails> rails, std::vector<size_t> on);
  ~Responder();
  Responder(const Responder&) = delete;
  std::vector<End> ends() const { return ends_; }
  void connect(size_t queue, const FarPort& far, End end, const Manner& manner);

 private:
  std::shared_ptr<Rails> rails_;
  std::vector<size_t> on_;
  std::vector<QueuePtr> queues_;  // after the rails
  std::vector<End> ends_;
};

}  // namespace mcr::verbs
