// libibverbs, found at run time: a program that has this code starts where the library is missing.
//
// Only what the library exports is called through here. Posting and polling are inline functions of its header, which go straight to the
// driver. The drivers are plugins of the system's own copy: a wheel must never bring another one along.
#pragma once
#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>

// The header wraps these two in macros of the same names; what is called are the symbols behind them.
#undef ibv_reg_mr
#undef ibv_query_port

namespace mcr::verbs {

struct Library {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  decltype(&::ibv_query_port) query_port;
  decltype(&::ibv_query_gid) query_gid;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  decltype(&::ibv_reg_mr) reg_mr;
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_fork_init) fork_init;
  decltype(&::ibv_wc_status_str) wc_status_str;
  // Null before rdma-core 34, whose header may lack it, too. Domain, offset in the file, bytes, address in requests, file, access.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int);
};

// Loaded at the first call, and for good. Throws Error(kUnavailable) with the reason, the same at every call. Thread-safe.
const Library& library();

}  // namespace mcr::verbs
