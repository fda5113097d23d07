// The extension `certkv._native`: the C++ client as the Python files of the package use it. Not
// for others: its names may change with any version.
#include <pybind11/pybind11.h>

#include "clients/python/native/numpy_array.h"
#include "clients/python/native/objects.h"

PYBIND11_MODULE(_native, module) {
  namespace python = certkv::python;
  module.attr("VERSION") = CERTKV_PYTHON_VERSION;
  python::DefineMemory(module);
  python::RegisterStatusError();
  python::DefineSpec(module);
  python::DefinePagedCache(module);
  python::DefineClient(module);
  python::DefineBlockChain(module);
  python::DefineRequest(module);
  python::DefineAttention(module);
}
