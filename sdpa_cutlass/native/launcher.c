/* The Launcher, and the module. */
#include "launcher.h"

#include <string.h>

enum { kInterface = 4 }; /* of the module's two types; launcher.py has the same */

PyTypeObject *launcher_type;

/* The newest version of the interface that this file speaks, or null. */
static const DLExchange *exchange_of(PyObject *capsule) {
  const DLExchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  while (exchange != NULL && exchange->version.major > kDLPackMajor) exchange = exchange->older;
  if (exchange != NULL && exchange->version.major == kDLPackMajor && exchange->view != NULL) return exchange;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "exchange has no view of tensors in DLPack 1.x");
  return NULL;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"tensor_type", "exchange",  "launch", "plan",           "owner", "device_type",
                          "device",      "addresses", "fail",   "make_workspace", NULL};
  PyObject *tensor_type, *capsule, *owner, *fail, *make_workspace;
  unsigned long long launch, plan;
  int device_type, device;
  const char *addresses;
  Py_ssize_t addresses_size;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOKKOiiy#OO", names, &tensor_type, &capsule, &launch, &plan, &owner,
                                   &device_type, &device, &addresses, &addresses_size, &fail, &make_workspace))
    return NULL;
  const DLExchange *const exchange = exchange_of(capsule);
  if (exchange == NULL) return NULL;
  if (addresses_size != (Py_ssize_t)sizeof(sdpa_addresses))
    return PyErr_Format(PyExc_ValueError, "addresses has %zd bytes; allowed are %zu", addresses_size,
                        sizeof(sdpa_addresses));
  if (device_type != kDLCPU && device_type != kDLCUDA)
    return PyErr_Format(PyExc_ValueError, "device_type is %d; allowed are %d (CPU) and %d (CUDA)", device_type,
                        (int)kDLCPU, (int)kDLCUDA);
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Launcher *self = (Launcher *)allocate(type, 0);
  if (self == NULL) return NULL;
  Py_INCREF(tensor_type);
  Py_INCREF(owner);
  Py_INCREF(fail);
  Py_INCREF(make_workspace);
  self->tensor_type = tensor_type;
  self->exchange = exchange;
  self->launch = (LaunchFunction)(uintptr_t)launch;
  self->plan = (const sdpa_plan *)(uintptr_t)plan;
  self->owner = owner;
  self->device_type = device_type;
  self->device = device;
  memcpy(&self->addresses, addresses, sizeof(sdpa_addresses));
  self->fail = fail;
  self->make_workspace = make_workspace;
  return (PyObject *)self;
}

static void launcher_dealloc(PyObject *object) {
  Launcher *self = (Launcher *)object;
  PyTypeObject *type = Py_TYPE(object);
  Py_XDECREF(self->tensor_type);
  Py_XDECREF(self->owner);
  Py_XDECREF(self->fail);
  Py_XDECREF(self->make_workspace);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

bool view_tensor(const Launcher *self, PyObject *tensor, DLTensor *view) {
  if ((PyObject *)Py_TYPE(tensor) != self->tensor_type) return false;
  if (self->exchange->view(tensor, view) == 0) return true;
  PyErr_Clear();
  return false;
}

int launch(const Launcher *self, sdpa_addresses *addresses, PyObject *out) {
  void *stream = NULL;
  if (self->device_type == kDLCUDA && self->exchange->current_stream(self->device_type, self->device, &stream) != 0)
    return -1;
  PyObject *workspace = NULL;
  if (self->make_workspace != Py_None) {
    PyObject *kept;
    unsigned long long address;
    workspace = PyObject_CallFunction(self->make_workspace, "OK", out, (unsigned long long)(uintptr_t)stream);
    if (workspace == NULL) return -1;
    if (!PyArg_ParseTuple(workspace, "OK", &kept, &address)) {
      Py_DECREF(workspace);
      return -1;
    }
    addresses->workspace = (void *)(uintptr_t)address;
  }
  PyThreadState *const state = PyEval_SaveThread();
  const int status = self->launch(self->plan, addresses, stream);
  PyEval_RestoreThread(state);
  Py_XDECREF(workspace); /* torch's allocator reuses it in the order of the stream */
  if (status == 0) return 0;
  PyObject *const result = PyObject_CallFunction(self->fail, "i", status);
  if (result != NULL) {
    Py_DECREF(result);
    PyErr_Format(PyExc_RuntimeError, "the library failed with status %d", status);
  }
  return -1;
}

static PyObject *launcher_run(PyObject *object, PyObject *const *args, Py_ssize_t count) {
  Launcher *const self = (Launcher *)object;
  DLTensor views[5];
  if (count != 5) return PyErr_Format(PyExc_TypeError, "run takes 5 arguments; %zd were given", count);
  const int is_watched = torch_is_watching();
  if (is_watched < 0) return NULL;
  if (is_watched > 0) Py_RETURN_FALSE;
  for (int i = 0; i < 4; ++i)
    if (!view_tensor(self, args[i], &views[i])) Py_RETURN_FALSE;
  for (int i = 0; i < 4; ++i)
    if (address_of(&views[i]) == NULL) Py_RETURN_FALSE;
  const bool has_lse = args[4] != Py_None;
  if (has_lse && !view_tensor(self, args[4], &views[4])) Py_RETURN_FALSE;
  sdpa_addresses addresses = self->addresses;
  addresses.q = address_of(&views[0]);
  addresses.k = address_of(&views[1]);
  addresses.v = address_of(&views[2]);
  addresses.out = address_of(&views[3]);
  addresses.softmax_lse = has_lse ? address_of(&views[4]) : NULL;
  if (launch(self, &addresses, args[3]) != 0 || tell_written(args[3], args[4]) != 0) return NULL;
  Py_RETURN_TRUE;
}

static PyMethodDef launcher_methods[] = {
    {"run", (PyCFunction)(void (*)(void))launcher_run, METH_FASTCALL,
     "run(query, key, value, out, softmax_lse) -> bool\n\nLaunches on tensors like those of the plan; checks nothing. "
     "False, and nothing was done, when one of them is not of the plan's tensor type or has no memory, or torch has "
     "to see the call."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot launcher_slots[] = {{Py_tp_new, (void *)launcher_new},
                                       {Py_tp_dealloc, (void *)launcher_dealloc},
                                       {Py_tp_methods, launcher_methods},
                                       {0, NULL}};
static PyType_Spec launcher_spec = {"sdpa_cutlass._launcher.Launcher", sizeof(Launcher), 0, Py_TPFLAGS_DEFAULT,
                                    launcher_slots};

static PyMethodDef module_functions[] = {
    {"watch", watch, METH_VARARGS,
     "watch((stack_depth, is_tracing), (is_function_mode, pre_dispatch_depth), forward_ad, is_grad_enabled,\n"
     "      increment_version)\n\n"
     "What is asked of torch from now on, and how it is told of tensors that were written."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                               "sdpa_cutlass._launcher",
                                               "A call whose signature is known, compiled.",
                                               -1,
                                               module_functions,
                                               NULL,
                                               NULL,
                                               NULL,
                                               NULL};

PyMODINIT_FUNC PyInit__launcher(void);

PyMODINIT_FUNC PyInit__launcher(void) {
  PyObject *const module = PyModule_Create(&module_definition);
  if (module == NULL) return NULL;
  launcher_type = (PyTypeObject *)PyType_FromSpec(&launcher_spec);
  PyObject *const table_type = make_call_table_type();
  if (launcher_type == NULL || table_type == NULL || PyModule_AddStringConstant(module, "version", SDPA_VERSION) != 0 ||
      PyModule_AddIntConstant(module, "interface", kInterface) != 0 ||
      PyModule_AddObjectRef(module, "Launcher", (PyObject *)launcher_type) != 0 ||
      PyModule_AddObjectRef(module, "CallTable", table_type) != 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
