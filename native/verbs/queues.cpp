#include "queues.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>

namespace mcr::verbs {
namespace {

constexpr uint32_t kMostReads = 16;  // under way on one queue pair: more do not make it faster
constexpr uint8_t kHops = 64;
constexpr uint32_t kPacketNumbers = 1 << 24;

void modify(const Rail& rail, ibv_qp* queue, ibv_qp_attr& attributes, int mask, const char* state) {
  if (const int e = library().modify_qp(queue, &attributes, mask))
    throw Error(Failure::kTransport, rail.port.name.device + ": a queue pair cannot be made ready to " + state + ": " + std::strerror(e),
                "ibv_modify_qp", e);
}

uint32_t least(uint32_t out, uint32_t in) { return std::max(1u, std::min({out, in, kMostReads})); }

}  // namespace

uint32_t reads_under_way(const Port& asks, const FarPort& answers) { return least(asks.reads_out, answers.reads_in); }
uint32_t reads_under_way(const FarPort& asks, const Port& answers) { return least(asks.reads_out, answers.reads_in); }

QueuePtr make_queue(const Rail& rail, ibv_cq* completions, uint32_t requests) {
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = completions;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = requests;
  wanted.cap.max_recv_wr = 1;
  wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
  QueuePtr out(library().create_qp(rail.domain.get(), &wanted));
  if (!out) throw call_failed(rail.port.name.device, "ibv_create_qp", errno);
  return out;
}

End new_end(const ibv_qp& queue) {
  thread_local std::mt19937 random{std::random_device{}()};
  return {queue.qp_num, uint32_t(random() % kPacketNumbers)};
}

void to_receive(const Rail& rail, ibv_qp* queue, const FarPort& far, End end, uint32_t reads, unsigned access, const Manner& manner) {
  const Port& near = rail.port;
  if (near.ethernet != far.ethernet)
    throw Error(Failure::kTransport, near.name.device + " and the peer's port are not of one kind of network", "connect", ENETUNREACH);
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_INIT;
  a.port_num = near.name.port;
  a.qp_access_flags = access;
  modify(rail, queue, a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "start");

  a = {};
  a.qp_state = IBV_QPS_RTR;
  a.path_mtu = ibv_mtu(std::min(near.mtu, far.mtu));
  a.dest_qp_num = end.number;
  a.rq_psn = end.first_packet;
  a.max_dest_rd_atomic = uint8_t(reads);
  a.min_rnr_timer = 12;
  a.ah_attr.port_num = near.name.port;
  a.ah_attr.sl = manner.service_level;
  a.ah_attr.dlid = far.lid;
  // Within one InfiniBand subnet the short address does.
  a.ah_attr.is_global = near.ethernet || !far.lid || !std::equal(near.gid.begin(), near.gid.begin() + 8, far.gid.begin());
  if (a.ah_attr.is_global) {
    std::memcpy(a.ah_attr.grh.dgid.raw, far.gid.data(), far.gid.size());
    a.ah_attr.grh.sgid_index = uint8_t(near.name.gid_index);
    a.ah_attr.grh.hop_limit = kHops;
    a.ah_attr.grh.traffic_class = manner.traffic_class;
  }
  constexpr int kMask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                        IBV_QP_MIN_RNR_TIMER;
  modify(rail, queue, a, kMask, "receive");
}

void to_send(const Rail& rail, ibv_qp* queue, End mine, uint32_t reads, const Manner& manner) {
  ibv_qp_attr a{};
  a.qp_state = IBV_QPS_RTS;
  a.timeout = manner.timeout;
  a.retry_cnt = manner.retries;
  a.rnr_retry = manner.retries;
  a.sq_psn = mine.first_packet;
  a.max_rd_atomic = uint8_t(reads);
  constexpr int kMask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
  modify(rail, queue, a, kMask, "send");
}

Responder::Responder(std::shared_ptr<Rails> rails, std::vector<size_t> on) : rails_(std::move(rails)), on_(std::move(on)) {
  rails_->check_process();
  for (const size_t i : on_) {
    const Rail& rail = (*rails_)[i];
    queues_.push_back(make_queue(rail, rail.none.get(), 1));
    ends_.push_back(new_end(*queues_.back()));
  }
}

Responder::~Responder() {
  if (!rails_->in_child()) return;
  for (QueuePtr& q : queues_) q.release();
}

void Responder::connect(size_t queue, const FarPort& far, End end, const Manner& manner) {
  rails_->check_process();
  const Rail& rail = (*rails_)[on_.at(queue)];
  to_receive(rail, queues_.at(queue).get(), far, end, reads_under_way(far, rail.port), IBV_ACCESS_REMOTE_READ, manner);
}

}  // namespace mcr::verbs
