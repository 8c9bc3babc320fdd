/* The CallTable: what one tensor and one call look like, which of them are known, and how a known one is made. */
#include "launcher.h"

#include <string.h>

enum { kMaxDims = 8, kMaxCalls = 32, kAlignment = 16 };

static PyObject *requires_grad_name;

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

PyObject *make_call_table_type(void) {
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  return requires_grad_name == NULL ? NULL : PyType_FromSpec(&table_spec);
}
