// The peer module's C++ exceptions to Python's. Called with the GIL held, inside a catch block.
#pragma once
#include "peer/link.h"
#include "raise.h"

// Of mooncake_ray.errors, set when the module is imported.
inline PyObject* mcr_peer_errors[3] = {};  // in the order of PeerError::Kind

inline void mcr_raise_peer() {
  try {
    throw;
  } catch (const mcr::peer::PeerError& e) {
    PyObject* args = Py_BuildValue("(ssis)", e.what(), e.op.c_str(), e.error, e.peer.c_str());
    if (args) PyErr_SetObject(mcr_peer_errors[e.kind], args);
    Py_XDECREF(args);
  } catch (...) {
    mcr_raise();
  }
}
