/* The CallTable: what one tensor and one call look like, which of them are known, and how a known one is made. */
#include "launcher.h"

#include <string.h>

enum { kMaxDims = 8, kMaxCalls = 32, kAlignment = 16 };
enum { kScale = 2, kDropout = 6, kWindow = 8, kLeading = 9, kOptions = 11 };
enum { kQuery, kKey, kValue, kOut, kMask, kSeqlensQ, kSeqlensK, kCuSeqlensQ, kCuSeqlensK, kSinks, kTensors };
enum { kMinArguments = kLeading + kOut + 1, kMaxArguments = kOptions + kTensors };

static PyObject *requires_grad_name;

/* What a plan depends on, of one tensor. */
typedef struct {
  DLDevice device;
  DLDataType dtype;
  int32_t ndim;
  int64_t shape[kMaxDims];
  int64_t strides[kMaxDims];
} Form;

/* What a call is given, in the order of its arguments but for the last two options: the lengths' upper bounds. */
typedef struct {
  PyObject *options[kOptions];
  PyObject *tensors[kTensors]; /* None for what is not given */
} Arguments;

typedef struct {
  Py_ssize_t users; /* the table, and the calls under way */
  Launcher *launcher;
  PyObject *options[kOptions]; /* of immutable types: the same object says the same */
  PyObject *make_out;          /* query -> out */
  PyObject *make_lse;          /* () -> softmax_lse, or None */
  PyObject *draw;              /* () -> philox, or None where no random bits are needed */
  PyObject *undrawn;           /* philox without `draw` */
  bool has[kTensors];
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
  Py_XDECREF(call->draw);
  Py_XDECREF(call->undrawn);
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

/* Scales, probabilities, bounds and names of the same value serve as well: callers make them anew each time. */
static bool same_option(PyObject *given, PyObject *known, int place) {
  if (given == known) return true;
  if (place == kScale || place == kDropout)
    return PyFloat_CheckExact(given) && PyFloat_CheckExact(known) && PyFloat_AsDouble(given) == PyFloat_AsDouble(known);
  if (place == kWindow) /* two integers, checked by the caller */
    return PyTuple_CheckExact(given) && PyTuple_CheckExact(known) && PyObject_RichCompareBool(given, known, Py_EQ) == 1;
  if (place >= kLeading)
    return PyLong_CheckExact(given) && PyLong_CheckExact(known) && PyObject_RichCompareBool(given, known, Py_EQ) == 1;
  return PyUnicode_CheckExact(given) && PyUnicode_CheckExact(known) && PyUnicode_Compare(given, known) == 0;
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

/* Whether Python has to look at the call: torch has to see it, a tensor requires grad, or the mask or the sinks are not
 * what their memory says. -1 with an exception. Only these can be views with the negative bit: others are aligned, and
 * such views start at an odd element unless as_strided moved them. Booleans have neither gradients nor that bit. */
static int needs_a_look(const Call *call, const Arguments *given) {
  int answer = torch_is_watching();
  if (answer != 0) return answer;
  const int has_grad = torch_has_grad();
  if (has_grad < 0) return -1;
  for (int i = 0; answer == 0 && i < kTensors; ++i) {
    const bool is_lengths = i > kMask && i < kSinks;
    if (!call->has[i] || is_lengths || call->forms[i].dtype.code == kDLBool) continue;
    if (has_grad) answer = requires_grad(given->tensors[i]);
    if (answer == 0 && i >= kMask) answer = is_neg(given->tensors[i]);
  }
  return answer;
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

/* Those that are not there are None. */
static Arguments arguments_of(PyObject *const *args, Py_ssize_t count) {
  Arguments given;
  for (int i = 0; i < kLeading; ++i) given.options[i] = args[i];
  for (int i = 0; i < kTensors; ++i) given.tensors[i] = kLeading + i < count ? args[kLeading + i] : Py_None;
  for (int i = kLeading; i < kOptions; ++i) given.options[i] = kTensors + i < count ? args[kTensors + i] : Py_None;
  return given;
}

static bool view_all(const Launcher *launcher, const Arguments *given, DLTensor *views) {
  for (int i = 0; i < kTensors; ++i)
    if (given->tensors[i] != Py_None && !view_tensor(launcher, given->tensors[i], &views[i])) return false;
  return true;
}

static bool is_call(const Call *call, const Arguments *given, const DLTensor *views) {
  for (int i = 0; i < kTensors; ++i)
    if (call->has[i] != (given->tensors[i] != Py_None)) return false;
  for (int i = 0; i < kOptions; ++i)
    if (!same_option(given->options[i], call->options[i], i)) return false;
  for (int i = 0; i < kTensors; ++i)
    if (call->has[i] && !has_form(&views[i], &call->forms[i])) return false;
  return true;
}

/* The call of this signature, moved to the front; or null. */
static Call *find(CallTable *self, const Arguments *given, const DLTensor *views) {
  for (int i = 0; i < self->count; ++i) {
    Call *const call = self->calls[i];
    if (!is_call(call, given, views)) continue;
    memmove(self->calls + 1, self->calls, (size_t)i * sizeof(Call *));
    self->calls[0] = call;
    return call;
  }
  return NULL;
}

/* A new reference, for a field that release() drops. */
static PyObject *kept(PyObject *object) {
  Py_INCREF(object);
  return object;
}

static PyObject *table_add(PyObject *object, PyObject *args) {
  CallTable *const self = (CallTable *)object;
  PyObject *launcher, *arguments, *make_out, *make_lse, *draw, *undrawn, *spans;
  if (!PyArg_ParseTuple(args, "O!O!OOOOO!", launcher_type, &launcher, &PyTuple_Type, &arguments, &make_out, &make_lse,
                        &draw, &undrawn, &PyTuple_Type, &spans))
    return NULL;
  PyObject *items[kMaxArguments];
  for (Py_ssize_t i = 0; i < kMaxArguments; ++i)
    if ((items[i] = PyTuple_GetItem(arguments, i)) == NULL) return NULL;
  const Arguments given = arguments_of(items, kMaxArguments);
  DLTensor views[kTensors];
  if (!view_all((Launcher *)launcher, &given, views)) Py_RETURN_FALSE;
  if (find(self, &given, views) != NULL) Py_RETURN_TRUE;
  Call *const call = PyMem_Calloc(1, sizeof(Call));
  if (call == NULL) return PyErr_NoMemory();
  call->users = 1;
  for (int i = 0; i < kTensors; ++i) {
    PyObject *const span = PyTuple_GetItem(spans, i);
    call->spans[i] = span == NULL ? -1 : PyLong_AsLongLong(span);
    call->has[i] = given.tensors[i] != Py_None;
    if (PyErr_Occurred()) {
      release(call);
      return NULL;
    }
    if (call->has[i] && !set_form(&views[i], &call->forms[i])) {
      release(call);
      Py_RETURN_FALSE;
    }
  }
  for (int i = 0; i < kOptions; ++i) call->options[i] = kept(given.options[i]);
  call->launcher = (Launcher *)kept(launcher);
  call->make_out = kept(make_out);
  call->make_lse = kept(make_lse);
  call->draw = kept(draw);
  call->undrawn = kept(undrawn);
  Call *const oldest = self->count == kMaxCalls ? self->calls[--self->count] : NULL;
  memmove(self->calls + 1, self->calls, (size_t)self->count * sizeof(Call *));
  self->calls[0] = call;
  ++self->count;
  if (oldest != NULL) release(oldest); /* last: it may run Python code */
  Py_RETURN_TRUE;
}

/* 1 when `philox`, a pair of integers or a tensor of two, is in `addresses`; 0 when it is neither; -1 with an
 * exception. */
static int set_philox(const Launcher *launcher, PyObject *philox, sdpa_addresses *addresses) {
  DLTensor view;
  if (view_tensor(launcher, philox, &view)) {
    addresses->philox_state = address_of(&view);
    return 1;
  }
  if (!PyTuple_Check(philox)) return 0;
  unsigned long long seed, offset;
  if (!PyArg_ParseTuple(philox, "KK", &seed, &offset)) return -1;
  addresses->philox_seed = seed;
  addresses->philox_offset = offset;
  return 1;
}

/* (out, softmax_lse or None, philox); None when the caller has to do it all; null with an exception. */
static PyObject *make_and_launch(const Call *call, const Arguments *given, sdpa_addresses *addresses) {
  DLTensor view;
  PyObject *out = given->tensors[kOut], *lse = NULL, *drawn = NULL, *result = NULL;
  if (call->has[kOut]) {
    Py_INCREF(out);
  } else {
    out = PyObject_CallFunctionObjArgs(call->make_out, given->tensors[kQuery], NULL);
    if (out == NULL) return NULL;
    if (!view_tensor(call->launcher, out, &view)) goto unknown;
    addresses->out = address_of(&view);
  }
  if (call->make_lse != Py_None) {
    lse = PyObject_CallFunctionObjArgs(call->make_lse, NULL);
    if (lse == NULL) goto done;
    if (!view_tensor(call->launcher, lse, &view)) goto unknown;
    addresses->softmax_lse = address_of(&view);
  }
  if (call->draw != Py_None) {
    drawn = PyObject_CallFunctionObjArgs(call->draw, NULL);
    const int is_set = drawn == NULL ? -1 : set_philox(call->launcher, drawn, addresses);
    if (is_set < 0) goto done;
    if (is_set == 0) goto unknown;
  }
  if (launch(call->launcher, addresses, out) == 0 && (!call->has[kOut] || tell_written(out, Py_None) == 0))
    result = PyTuple_Pack(3, out, lse == NULL ? Py_None : lse, drawn == NULL ? call->undrawn : drawn);
  goto done;
unknown:
  result = kept(Py_None);
done:
  Py_DECREF(out);
  Py_XDECREF(lse);
  Py_XDECREF(drawn);
  return result;
}

static PyObject *table_call(PyObject *object, PyObject *const *args, Py_ssize_t count) {
  CallTable *const self = (CallTable *)object;
  if (count < kMinArguments || count > kMaxArguments)
    return PyErr_Format(PyExc_TypeError, "call takes %d to %d arguments; %zd were given", kMinArguments, kMaxArguments,
                        count);
  if (self->count == 0) Py_RETURN_NONE;
  const Arguments given = arguments_of(args, count);
  DLTensor views[kTensors];
  if (!view_all(self->calls[0]->launcher, &given, views)) Py_RETURN_NONE;
  Call *const call = find(self, &given, views);
  if (call == NULL) Py_RETURN_NONE;
  char *starts[kTensors] = {NULL};
  for (int i = 0; i < kTensors; ++i)
    if (call->has[i]) starts[i] = address_of(&views[i]);
  for (int i = 0; i < kTensors; ++i)
    if (call->has[i] && starts[i] == NULL) Py_RETURN_NONE; /* a functional tensor, or one without storage */
  for (int i = 0; i <= kOut; ++i)
    if ((uintptr_t)starts[i] % kAlignment != 0) Py_RETURN_NONE;
  for (int i = 0; call->has[kOut] && i < kTensors; ++i)
    if (i != kOut && call->has[i] && overlaps(starts[kOut], call->spans[kOut], starts[i], call->spans[i]))
      Py_RETURN_NONE;
  ++call->users; /* from here on Python code may run, and other threads */
  const int needs_look = needs_a_look(call, &given);
  PyObject *result = NULL;
  if (needs_look == 0) {
    sdpa_addresses addresses = call->launcher->addresses;
    addresses.q = starts[kQuery];
    addresses.k = starts[kKey];
    addresses.v = starts[kValue];
    addresses.out = starts[kOut];
    addresses.mask = starts[kMask];
    addresses.philox_seed = addresses.philox_offset = 0;
    addresses.philox_state = NULL;
    addresses.seqlens_q = (const int32_t *)starts[kSeqlensQ];
    addresses.seqlens_k = (const int32_t *)starts[kSeqlensK];
    addresses.cu_seqlens_q = (const int32_t *)starts[kCuSeqlensQ];
    addresses.cu_seqlens_k = (const int32_t *)starts[kCuSeqlensK];
    addresses.sinks = starts[kSinks];
    result = make_and_launch(call, &given, &addresses);
  } else if (needs_look > 0) {
    result = kept(Py_None);
  }
  release(call);
  return result;
}

static PyMethodDef table_methods[] = {
    {"call", (PyCFunction)(void (*)(void))table_call, METH_FASTCALL,
     "call(family, causal, scale, enable_gqa, kernel, return_lse, p_dropout, layout, window, query, key, value, out,\n"
     "     attn_mask, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, sinks, max_seqlen_q, max_seqlen_k)\n"
     "-> (out, softmax_lse or None, philox), or None\n\n"
     "Launches a known call. None, and nothing was launched: the caller has to check, and to do it or to refuse it.\n"
     "What follows `out` may be left out. `window` is None or a tuple of two integers."},
    {"add", table_add, METH_VARARGS,
     "add(launcher, arguments, make_out, make_lse, draw, undrawn, spans) -> bool\n\n"
     "Makes a call known: `arguments`, all of them, as in call, its options of immutable types; `spans` are bytes of\n"
     "its tensors. False when it cannot be."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot table_slots[] = {
    {Py_tp_new, (void *)table_new}, {Py_tp_dealloc, (void *)table_dealloc}, {Py_tp_methods, table_methods}, {0, NULL}};
static PyType_Spec table_spec = {"sdpa_cutlass._launcher.CallTable", sizeof(CallTable), 0, Py_TPFLAGS_DEFAULT,
                                 table_slots};

PyObject *make_call_table_type(void) {
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  return requires_grad_name == NULL ? NULL : PyType_FromSpec(&table_spec);
}
