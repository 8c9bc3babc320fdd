/* sdpa_cutlass._launcher: a call whose signature is known, compiled. Optional: calls.py does the same in Python.
 *
 * Tensors are read through DLPack's C exchange interface (DLPack 1.x, `__dlpack_c_exchange_api__` of a tensor type),
 * so this file needs neither torch nor CUDA to be built, and one file serves every CPython from 3.10 on (stable ABI).
 *
 *   Launcher    a plan: sdpa_params as bytes, and where it goes. run() writes addresses and calls sdpa_launch.
 *   CallTable   the latest signatures. call() finds one, makes the results and launches; whatever it does not know,
 *               or must not decide, it leaves to the caller by returning None, before anything has happened.
 *
 * The GIL is released while the library works. What a call uses meanwhile is its own: a copy of the struct, and
 * references to all that other threads might drop from the table.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* DLPack 1.x, as far as it is used. */
enum { kDLCPU = 1, kDLCUDA = 2, kDLPackMajor = 1 };

typedef struct {
  int32_t type;
  int32_t index;
} DLDevice;

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides; /* in elements */
  uint64_t byte_offset;
} DLTensor;

typedef struct DLExchange {
  struct {
    uint32_t major, minor;
  } version;
  const struct DLExchange *older;
  void *allocate, *export_tensor, *import_tensor; /* not used */
  int (*view)(void *tensor, DLTensor *view);      /* may be null */
  int (*current_stream)(int32_t device_type, int32_t device, void **stream);
} DLExchange;

typedef int (*LaunchFunction)(int index, const void *params, int device, void *stream);

enum { kInterface = 1 }; /* of the two types below; launcher.py has the same */
enum { kMaxParams = 1024, kMaxDims = 8, kMaxCalls = 32, kAlignment = 16 };

static PyTypeObject *launcher_type;
static PyObject *requires_grad_name;

/* ---- Launcher ---- */

typedef struct {
  PyObject_HEAD
  PyObject *tensor_type;
  const DLExchange *exchange;
  LaunchFunction launch;
  int index;
  int32_t device_type;
  int device;
  Py_ssize_t params_size;
  Py_ssize_t addresses; /* where Addresses lie in params */
  unsigned char params[kMaxParams];
  PyObject *fail; /* status -> raises */
  PyObject *meet; /* (out, stream) -> (what to keep until the launch is queued, workspace, split_arrivals), or None */
  uint64_t workspace_bytes;
} Launcher;

/* The words of sdpa_params that change from call to call. */
typedef struct {
  const void *q, *k, *v;
  void *out, *softmax_lse;
  uint64_t workspace, workspace_bytes, split_arrivals;
} Addresses;

/* The newest version of the interface that this file speaks, or null. */
static const DLExchange *exchange_of(PyObject *capsule) {
  const DLExchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  while (exchange != NULL && exchange->version.major > kDLPackMajor) exchange = exchange->older;
  if (exchange != NULL && exchange->version.major == kDLPackMajor && exchange->view != NULL) return exchange;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "exchange has no view of tensors in DLPack 1.x");
  return NULL;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"tensor_type", "exchange",  "launch", "index", "device_type",     "device",
                          "params",      "addresses", "fail",   "meet",  "workspace_bytes", NULL};
  PyObject *tensor_type, *capsule, *fail, *meet;
  unsigned long long launch, workspace_bytes;
  int index, device_type, device;
  const char *params;
  Py_ssize_t params_size, addresses;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOKiiiy#nOOK", names, &tensor_type, &capsule, &launch, &index,
                                   &device_type, &device, &params, &params_size, &addresses, &fail, &meet,
                                   &workspace_bytes))
    return NULL;
  const DLExchange *const exchange = exchange_of(capsule);
  if (exchange == NULL) return NULL;
  if (params_size > kMaxParams || addresses < 0 || addresses + (Py_ssize_t)sizeof(Addresses) > params_size)
    return PyErr_Format(PyExc_ValueError, "params has %zd bytes and addresses is %zd; allowed are at most %d bytes, %zu "
                        "of them from addresses on", params_size, addresses, (int)kMaxParams, sizeof(Addresses));
  if (device_type != kDLCPU && device_type != kDLCUDA)
    return PyErr_Format(PyExc_ValueError, "device_type is %d; allowed are %d (CPU) and %d (CUDA)", device_type,
                        (int)kDLCPU, (int)kDLCUDA);
  allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  Launcher *self = (Launcher *)allocate(type, 0);
  if (self == NULL) return NULL;
  Py_INCREF(tensor_type);
  Py_INCREF(fail);
  Py_INCREF(meet);
  self->tensor_type = tensor_type;
  self->exchange = exchange;
  self->launch = (LaunchFunction)(uintptr_t)launch;
  self->index = index;
  self->device_type = device_type;
  self->device = device;
  self->params_size = params_size;
  self->addresses = addresses;
  memcpy(self->params, params, (size_t)params_size);
  self->fail = fail;
  self->meet = meet;
  self->workspace_bytes = workspace_bytes;
  return (PyObject *)self;
}

static void launcher_dealloc(PyObject *object) {
  Launcher *self = (Launcher *)object;
  PyTypeObject *type = Py_TYPE(object);
  Py_XDECREF(self->tensor_type);
  Py_XDECREF(self->fail);
  Py_XDECREF(self->meet);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* False for another type, a subclass too, and for a tensor without memory; no exception is left behind. */
static bool view_tensor(const Launcher *self, PyObject *tensor, DLTensor *view) {
  if ((PyObject *)Py_TYPE(tensor) != self->tensor_type) return false;
  if (self->exchange->view(tensor, view) == 0) return true;
  PyErr_Clear();
  return false;
}

static void *address_of(const DLTensor *view) { return (char *)view->data + view->byte_offset; }

/* Returns 0, or -1 with an exception. */
static int launch(const Launcher *self, Addresses addresses, PyObject *out) {
  void *stream = NULL;
  if (self->device_type == kDLCUDA &&
      self->exchange->current_stream(self->device_type, self->device, &stream) != 0)
    return -1;
  PyObject *meeting = NULL;
  if (self->meet != Py_None) {
    PyObject *kept;
    unsigned long long workspace, arrivals;
    meeting = PyObject_CallFunction(self->meet, "OK", out, (unsigned long long)(uintptr_t)stream);
    if (meeting == NULL) return -1;
    if (!PyArg_ParseTuple(meeting, "OKK", &kept, &workspace, &arrivals)) {
      Py_DECREF(meeting);
      return -1;
    }
    addresses.workspace = workspace;
    addresses.split_arrivals = arrivals;
  }
  addresses.workspace_bytes = self->workspace_bytes;
  unsigned char params[kMaxParams];
  memcpy(params, self->params, (size_t)self->params_size);
  memcpy(params + self->addresses, &addresses, sizeof(addresses));
  PyThreadState *const state = PyEval_SaveThread();
  const int status = self->launch(self->index, params, self->device, stream);
  PyEval_RestoreThread(state);
  Py_XDECREF(meeting); /* torch's allocator reuses the workspace in the order of the stream */
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
  for (int i = 0; i < 4; ++i)
    if (!view_tensor(self, args[i], &views[i])) Py_RETURN_FALSE;
  const bool has_lse = args[4] != Py_None;
  if (has_lse && !view_tensor(self, args[4], &views[4])) Py_RETURN_FALSE;
  const Addresses addresses = {.q = address_of(&views[0]),
                               .k = address_of(&views[1]),
                               .v = address_of(&views[2]),
                               .out = address_of(&views[3]),
                               .softmax_lse = has_lse ? address_of(&views[4]) : NULL};
  if (launch(self, addresses, args[3]) != 0) return NULL;
  Py_RETURN_TRUE;
}

static PyMethodDef launcher_methods[] = {
    {"run", (PyCFunction)(void (*)(void))launcher_run, METH_FASTCALL,
     "run(query, key, value, out, softmax_lse) -> bool\n\nLaunches on tensors like those of the plan; checks nothing. "
     "False, and nothing was done, when one of them is not of the plan's tensor type or has no memory."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot launcher_slots[] = {{Py_tp_new, (void *)launcher_new},
                                       {Py_tp_dealloc, (void *)launcher_dealloc},
                                       {Py_tp_methods, launcher_methods},
                                       {0, NULL}};
static PyType_Spec launcher_spec = {"sdpa_cutlass._launcher.Launcher", sizeof(Launcher), 0, Py_TPFLAGS_DEFAULT,
                                    launcher_slots};

/* ---- CallTable ---- */

/* What a plan depends on, of one tensor. */
typedef struct {
  DLDevice device;
  DLDataType dtype;
  int32_t ndim;
  int64_t shape[kMaxDims];
  int64_t strides[kMaxDims];
} Form;

enum { kQuery, kKey, kValue, kOut, kTensors };
enum { kOptions = 6, kScale = 2 };

typedef struct {
  Py_ssize_t users; /* the table, and the calls under way */
  Launcher *launcher;
  PyObject *options[kOptions]; /* of immutable types: the same object says the same */
  PyObject *make_out;          /* query -> out */
  PyObject *make_lse;          /* () -> softmax_lse, or None */
  bool has_out;
  Form forms[kTensors];
  int64_t spans[kTensors]; /* bytes */
} Call;

typedef struct {
  PyObject_HEAD
  int count;
  Call *calls[kMaxCalls]; /* the latest one first */
} CallTable;

static void release(Call *call) {
  if (--call->users > 0) return;
  Py_XDECREF(call->launcher);
  for (int i = 0; i < kOptions; ++i) Py_XDECREF(call->options[i]);
  Py_XDECREF(call->make_out);
  Py_XDECREF(call->make_lse);
  PyMem_Free(call);
}

static bool set_form(const DLTensor *view, Form *form) {
  if (view->ndim > kMaxDims || view->strides == NULL) return false;
  const size_t size = (size_t)view->ndim * sizeof(int64_t);
  form->device = view->device;
  form->dtype = view->dtype;
  form->ndim = view->ndim;
  memcpy(form->shape, view->shape, size);
  memcpy(form->strides, view->strides, size);
  return true;
}

static bool has_form(const DLTensor *view, const Form *form) {
  if (view->ndim != form->ndim || view->dtype.code != form->dtype.code || view->dtype.bits != form->dtype.bits ||
      view->dtype.lanes != form->dtype.lanes || view->device.type != form->device.type ||
      view->device.index != form->device.index || view->strides == NULL)
    return false;
  for (int i = 0; i < view->ndim; ++i)
    if (view->shape[i] != form->shape[i] || view->strides[i] != form->strides[i]) return false;
  return true;
}

/* A scale of the same value serves as well: most callers compute it anew each time. */
static bool same_options(PyObject *const *given, const Call *call) {
  for (int i = 0; i < kOptions; ++i) {
    if (given[i] == call->options[i]) continue;
    if (i != kScale || !PyFloat_CheckExact(given[i]) || !PyFloat_CheckExact(call->options[i]) ||
        PyFloat_AsDouble(given[i]) != PyFloat_AsDouble(call->options[i]))
      return false;
  }
  return true;
}

static bool overlaps(const char *start, int64_t size, const char *other, int64_t other_size) {
  return start < other + other_size && other < start + size;
}

/* -1 with an exception when the attribute cannot be read. */
static int requires_grad(PyObject *tensor) {
  PyObject *const value = PyObject_GetAttr(tensor, requires_grad_name);
  if (value == NULL) return -1;
  Py_DECREF(value);
  return value != Py_False;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {NULL};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "", names)) return NULL;
  return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

static void table_dealloc(PyObject *object) {
  CallTable *self = (CallTable *)object;
  PyTypeObject *type = Py_TYPE(object);
  while (self->count > 0) release(self->calls[--self->count]);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

/* Views of the tensors, by their order in a call; out only if it is given. */
static bool view_all(const Launcher *launcher, PyObject *const *tensors, DLTensor *views) {
  for (int i = 0; i < kTensors; ++i) {
    if (i == kOut && tensors[i] == Py_None) continue;
    if (!view_tensor(launcher, tensors[i], &views[i])) return false;
  }
  return true;
}

static PyObject *table_add(PyObject *object, PyObject *args) {
  CallTable *const self = (CallTable *)object;
  PyObject *launcher, *options[kOptions], *tensors[kTensors], *make_out, *make_lse;
  long long spans[kTensors];
  if (!PyArg_ParseTuple(args, "O!(OOOOOO)(OOOO)OO(LLLL)", launcher_type, &launcher, &options[0], &options[1],
                        &options[2], &options[3], &options[4], &options[5], &tensors[0], &tensors[1], &tensors[2],
                        &tensors[3], &make_out, &make_lse, &spans[0], &spans[1], &spans[2], &spans[3]))
    return NULL;
  DLTensor views[kTensors];
  if (!view_all((Launcher *)launcher, tensors, views)) Py_RETURN_FALSE;
  Call *const call = PyMem_Calloc(1, sizeof(Call));
  if (call == NULL) return PyErr_NoMemory();
  call->users = 1;
  call->has_out = tensors[kOut] != Py_None;
  for (int i = 0; i < kTensors; ++i) {
    call->spans[i] = spans[i];
    if ((i != kOut || call->has_out) && !set_form(&views[i], &call->forms[i])) {
      release(call);
      Py_RETURN_FALSE;
    }
  }
  for (int i = 0; i < kOptions; ++i) {
    Py_INCREF(options[i]);
    call->options[i] = options[i];
  }
  Py_INCREF(launcher);
  Py_INCREF(make_out);
  Py_INCREF(make_lse);
  call->launcher = (Launcher *)launcher;
  call->make_out = make_out;
  call->make_lse = make_lse;
  Call *const oldest = self->count == kMaxCalls ? self->calls[--self->count] : NULL;
  memmove(self->calls + 1, self->calls, (size_t)self->count * sizeof(Call *));
  self->calls[0] = call;
  ++self->count;
  if (oldest != NULL) release(oldest); /* last: it may run Python code */
  Py_RETURN_TRUE;
}

/* The call of this signature, moved to the front; or null. */
static Call *find(CallTable *self, PyObject *const *options, const DLTensor *views, bool has_out) {
  for (int i = 0; i < self->count; ++i) {
    Call *const call = self->calls[i];
    if (call->has_out != has_out || !same_options(options, call)) continue;
    bool same = true;
    for (int t = 0; same && t < (has_out ? kTensors : kOut); ++t) same = has_form(&views[t], &call->forms[t]);
    if (!same) continue;
    memmove(self->calls + 1, self->calls, (size_t)i * sizeof(Call *));
    self->calls[0] = call;
    return call;
  }
  return NULL;
}

/* (out, softmax_lse or None); None when the caller has to do it all; null with an exception. */
static PyObject *make_and_launch(const Call *call, PyObject *query, PyObject *given_out, Addresses addresses) {
  DLTensor view;
  PyObject *out = given_out, *lse = NULL, *result = NULL;
  if (call->has_out) {
    Py_INCREF(out);
  } else {
    out = PyObject_CallFunctionObjArgs(call->make_out, query, NULL);
    if (out == NULL) return NULL;
    if (!view_tensor(call->launcher, out, &view)) goto unknown;
    addresses.out = address_of(&view);
  }
  if (call->make_lse != Py_None) {
    lse = PyObject_CallFunctionObjArgs(call->make_lse, NULL);
    if (lse == NULL) goto done;
    if (!view_tensor(call->launcher, lse, &view)) goto unknown;
    addresses.softmax_lse = address_of(&view);
  }
  if (launch(call->launcher, addresses, out) == 0) result = PyTuple_Pack(2, out, lse == NULL ? Py_None : lse);
  goto done;
unknown:
  Py_INCREF(Py_None);
  result = Py_None;
done:
  Py_DECREF(out);
  Py_XDECREF(lse);
  return result;
}

static PyObject *table_call(PyObject *object, PyObject *const *args, Py_ssize_t count) {
  CallTable *const self = (CallTable *)object;
  if (count != kOptions + kTensors)
    return PyErr_Format(PyExc_TypeError, "call takes %d arguments; %zd were given", kOptions + kTensors, count);
  if (self->count == 0) Py_RETURN_NONE;
  PyObject *const *const tensors = args + kOptions;
  const bool has_out = tensors[kOut] != Py_None;
  DLTensor views[kTensors];
  if (!view_all(self->calls[0]->launcher, tensors, views)) Py_RETURN_NONE;
  Call *const call = find(self, args, views, has_out);
  if (call == NULL) Py_RETURN_NONE;
  const char *starts[kTensors] = {NULL};
  uintptr_t low_bits = 0;
  for (int i = 0; i < (has_out ? kTensors : kOut); ++i) {
    starts[i] = address_of(&views[i]);
    low_bits |= (uintptr_t)starts[i];
  }
  if (low_bits % kAlignment != 0) Py_RETURN_NONE;
  if (has_out)
    for (int i = 0; i < kOut; ++i)
      if (overlaps(starts[kOut], call->spans[kOut], starts[i], call->spans[i])) Py_RETURN_NONE;
  ++call->users; /* from here on Python code may run, and other threads */
  int needs_grad = 0;
  for (int i = 0; needs_grad == 0 && i < (has_out ? kTensors : kOut); ++i) needs_grad = requires_grad(tensors[i]);
  PyObject *result = NULL;
  if (needs_grad == 0) {
    const Addresses addresses = {
        .q = starts[kQuery], .k = starts[kKey], .v = starts[kValue], .out = (void *)starts[kOut]};
    result = make_and_launch(call, tensors[kQuery], tensors[kOut], addresses);
  } else if (needs_grad > 0) {
    Py_INCREF(Py_None);
    result = Py_None;
  }
  release(call);
  return result;
}

static PyMethodDef table_methods[] = {
    {"call", (PyCFunction)(void (*)(void))table_call, METH_FASTCALL,
     "call(family, causal, scale, enable_gqa, kernel, return_lse, query, key, value, out)\n"
     "-> (out, softmax_lse or None), or None\n\n"
     "Launches a known call. None, and nothing was launched: the caller has to check, and to do it or to refuse it."},
    {"add", table_add, METH_VARARGS,
     "add(launcher, options, (query, key, value, out), make_out, make_lse, spans) -> bool\n\n"
     "Makes a call known: `options` as in call, of immutable types. False when it cannot be."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot table_slots[] = {{Py_tp_new, (void *)table_new},
                                    {Py_tp_dealloc, (void *)table_dealloc},
                                    {Py_tp_methods, table_methods},
                                    {0, NULL}};
static PyType_Spec table_spec = {"sdpa_cutlass._launcher.CallTable", sizeof(CallTable), 0, Py_TPFLAGS_DEFAULT,
                                 table_slots};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "sdpa_cutlass._launcher", "A call whose signature is known, compiled.", -1, NULL, NULL,
    NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__launcher(void);

PyMODINIT_FUNC PyInit__launcher(void) {
  PyObject *const module = PyModule_Create(&module_definition);
  if (module == NULL) return NULL;
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  launcher_type = (PyTypeObject *)PyType_FromSpec(&launcher_spec);
  PyObject *const table_type = PyType_FromSpec(&table_spec);
  if (requires_grad_name == NULL || launcher_type == NULL || table_type == NULL ||
      PyModule_AddStringConstant(module, "version", SDPA_VERSION) != 0 ||
      PyModule_AddIntConstant(module, "interface", kInterface) != 0 ||
      PyModule_AddObjectRef(module, "Launcher", (PyObject *)launcher_type) != 0 ||
      PyModule_AddObjectRef(module, "CallTable", table_type) != 0) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
