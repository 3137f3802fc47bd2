/* Hands a prepared communicator to the next caller of NCCL's init on this thread; passes every other call on.
 *
 * Owns: the four entry points below, which stand before those of libnccl.so.2 when this library is loaded globally
 * first, and one communicator per thread that waits to be adopted. Knows nothing of who prepared it.
 *
 * C11, no NCCL or CUDA headers: a unique id is 128 bytes by value, everything else here is an int or a pointer.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

typedef struct { char internal[128]; } unique_id;

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4 };

typedef int (*get_unique_id_fn)(unique_id *);
typedef int (*init_rank_fn)(void **, int, unique_id, int);
typedef int (*init_rank_config_fn)(void **, int, unique_id, int, void *);
typedef int (*init_rank_scalable_fn)(void **, int, int, int, unique_id *, void *);

static _Thread_local struct { void *comm; int size; int rank; } waiting;
static _Thread_local const char *problem;
static atomic_int num_calls, num_adopted;

/* ---- for overlay.py */

void lm_nccl_hand_over(void *comm, int size, int rank) {
    waiting.comm = comm;
    waiting.size = size;
    waiting.rank = rank;
}

/* Returns what still waits on this thread, NULL for nothing. */
void *lm_nccl_take_back(void) {
    void *comm = waiting.comm;
    waiting.comm = NULL;
    return comm;
}

int lm_nccl_num_calls(void) { return atomic_load(&num_calls); }
int lm_nccl_num_adopted(void) { return atomic_load(&num_adopted); }

/* Why the last call on this thread was answered here with an error; NULL if none was. */
const char *lm_nccl_problem(void) { return problem; }

/* ---- instead of NCCL's */

/* The function of the libnccl.so.2 that is loaded already: a second copy wouldn't know the first's communicators. */
static int find_real(const char *name, void *function) {
    void *library = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY);
    void *symbol = library ? dlsym(library, name) : NULL;
    if (!symbol) {
        problem = library ? "the loaded libnccl.so.2 lacks the function" : "no libnccl.so.2 is loaded";
        return SYSTEM_ERROR;
    }
    memcpy(function, &symbol, sizeof symbol);  /* ISO C has no cast from object to function pointer */
    return SUCCESS;
}

static int adopt(void **comm, int size, int rank) {
    if (size != waiting.size || rank != waiting.rank) {
        problem = "size or rank differ from the communicator that was handed over";
        return INVALID_ARGUMENT;
    }
    *comm = lm_nccl_take_back();
    atomic_fetch_add(&num_adopted, 1);
    return SUCCESS;
}

/* A caller that is about to adopt needs no id: a real one would start a bootstrap thread that nobody ever ends. */
int ncclGetUniqueId(unique_id *id) {
    if (waiting.comm) {
        memset(id->internal, 0, sizeof id->internal);
        return SUCCESS;
    }
    get_unique_id_fn real;
    int code = find_real("ncclGetUniqueId", &real);
    return code ? code : real(id);
}

int ncclCommInitRankConfig(void **comm, int size, unique_id id, int rank, void *config) {
    atomic_fetch_add(&num_calls, 1);
    if (waiting.comm) return adopt(comm, size, rank);
    init_rank_config_fn real;
    int code = find_real("ncclCommInitRankConfig", &real);
    return code ? code : real(comm, size, id, rank, config);
}

int ncclCommInitRankScalable(void **comm, int size, int rank, int num_ids, unique_id *ids, void *config) {
    atomic_fetch_add(&num_calls, 1);
    if (waiting.comm) return adopt(comm, size, rank);
    init_rank_scalable_fn real;
    int code = find_real("ncclCommInitRankScalable", &real);
    return code ? code : real(comm, size, rank, num_ids, ids, config);
}

int ncclCommInitRank(void **comm, int size, unique_id id, int rank) {
    atomic_fetch_add(&num_calls, 1);
    if (waiting.comm) return adopt(comm, size, rank);
    init_rank_fn real;
    int code = find_real("ncclCommInitRank", &real);
    return code ? code : real(comm, size, id, rank);
}
