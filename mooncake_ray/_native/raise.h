// C++ exceptions to Python's. Called with the GIL held, inside a catch block.
#pragma once
#include <Python.h>

#include <exception>
#include <new>
#include <system_error>

#include "pool/client.h"

// Of mooncake_ray.errors, set when the module is imported.
inline PyObject* mcr_broker_died = nullptr;
inline PyObject* mcr_broker_mismatch = nullptr;

inline void mcr_raise() {
  try {
    throw;
  } catch (const mcr::Interrupted&) {
    if (!PyErr_Occurred()) PyErr_SetNone(PyExc_KeyboardInterrupt);
  } catch (const mcr::BrokerGone& e) {
    PyErr_SetString(mcr_broker_died, e.what());
  } catch (const mcr::BrokerForeign& e) {
    PyErr_SetString(mcr_broker_mismatch, e.what());
  } catch (const std::system_error& e) {
    PyObject* args = Py_BuildValue("(is)", e.code().value(), e.what());
    if (args) PyErr_SetObject(PyExc_OSError, args);
    Py_XDECREF(args);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
}
