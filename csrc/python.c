/* Whether a thread of Python may be using the device. The caller holds Python's lock, so no thread can begin anything; but
 * one that let go of the lock may be in the middle of an operation of the framework. Where it let go shows in its frame:
 * known are the places of the standard library, and of the client, that only wait. Whatever else counts as work.
 *
 * Python's functions are looked up in the process; there is no header of Python's here, and without them nothing rests.
 */
#include "state.h"
#include "symbols.h"

static struct {
    void *(*PyThreadState_Get)(void);
    void *(*PyInterpreterState_Get)(void);
    void *(*PyInterpreterState_ThreadHead)(void *);
    void *(*PyThreadState_Next)(void *);
    void *(*PyThreadState_GetFrame)(void *);
    void *(*PyFrame_GetCode)(void *);
    void *(*PyObject_GetAttrString)(void *, const char *);
    const char *(*PyUnicode_AsUTF8)(void *);
    void (*Py_DecRef)(void *);
    int (*PyGC_Disable)(void);
    int (*PyGC_Enable)(void);
    void (*PyErr_Clear)(void);
} python;

static const struct {
    const char *file, *function;
} waits[] = {
    {"threading.py", "wait"},
    {"threading.py", "join"},
    {"threading.py", "_wait_for_tstate_lock"},
    {"queue.py", "get"},
    {"queue.py", "put"},
    {"selectors.py", "select"},
    {"socket.py", "accept"},
    {"socket.py", "readinto"},
    {"subprocess.py", "wait"},
    {"subprocess.py", "_wait"},
    {"subprocess.py", "_try_wait"},
    {"concurrent/futures/thread.py", "_worker"},
    {"multiprocessing/connection.py", "_recv"},
    {"multiprocessing/connection.py", "wait"},
    {"multiprocessing/popen_fork.py", "poll"},
};
static char *library; /* the folder of the standard library, with a slash at the end */
static char *client;  /* the file of the client that waits for leases */

static int load(void) {
    static const struct symbol symbols[] = {
#define CALL_OF(name) SYMBOL(python, name, #name)
        CALL_OF(PyThreadState_Get),      CALL_OF(PyInterpreterState_Get), CALL_OF(PyInterpreterState_ThreadHead),
        CALL_OF(PyThreadState_Next),     CALL_OF(PyThreadState_GetFrame), CALL_OF(PyFrame_GetCode),
        CALL_OF(PyObject_GetAttrString), CALL_OF(PyUnicode_AsUTF8),       CALL_OF(Py_DecRef),
        CALL_OF(PyGC_Disable),           CALL_OF(PyGC_Enable),            CALL_OF(PyErr_Clear),
#undef CALL_OF
    };
    return LOOK_UP(RTLD_DEFAULT, symbols, python);
}

void salus_arena_trust(const char *stdlib, const char *lease) {
    free(library);
    free(client);
    library = strdup(stdlib);
    client = strdup(lease);
}

static int only_waits(const char *file, const char *function) {
    size_t length = strlen(library);
    if (!strcmp(file, client))
        return !strcmp(function, "_poll") || !strcmp(function, "_take") || !strcmp(function, "_detach");
    if (strncmp(file, library, length))
        return 0;
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++)
        if (!strcmp(file + length, waits[i].file) && !strcmp(function, waits[i].function))
            return 1;
    return 0;
}

static int rests(void *thread) {
    void *frame = python.PyThreadState_GetFrame(thread), *code, *file, *name;
    int found;
    if (!frame)
        return 1; /* it runs nothing of Python */
    code = python.PyFrame_GetCode(frame);
    file = python.PyObject_GetAttrString(code, "co_filename");
    name = python.PyObject_GetAttrString(code, "co_name");
    found = file && name && only_waits(python.PyUnicode_AsUTF8(file), python.PyUnicode_AsUTF8(name));
    if (!file || !name)
        python.PyErr_Clear();
    if (file)
        python.Py_DecRef(file);
    if (name)
        python.Py_DecRef(name);
    python.Py_DecRef(code);
    python.Py_DecRef(frame);
    return found;
}

int python_rests(void) {
    void *self, *thread;
    int found = 1, collects;
    if (!library)
        return 1; /* nobody said that there is a Python that matters */
    if (!python.PyErr_Clear && load())
        return 0;
    self = python.PyThreadState_Get();
    /* Looking at a frame may make an object, and that start a collection: of tensors, whose end comes back here. */
    collects = python.PyGC_Disable();
    for (thread = python.PyInterpreterState_ThreadHead(python.PyInterpreterState_Get()); thread && found;
         thread = python.PyThreadState_Next(thread))
        found = thread == self || rests(thread);
    if (collects)
        python.PyGC_Enable();
    return found;
}
