/* What the files of the room "memory" offer each other and cycle.c.
 *
 * memory.c          the plain ways to get memory: linear, pitched, managed, arrays, imported; contexts that go
 * memory_mapped.c   physical memory that is created and mapped (virtual memory management)
 * memory_pools.c    stream-ordered memory: pools, and what graphs allocate
 * memory_account.c  how much this process holds of each device, and whether there is room for more
 * memory_table.c    what is held, by its handle
 * memory_report.c   what a program is told of the device's memory by the driver
 * memory_nvml.c     and what by NVML
 *
 * One lock for all of it; functions that say "locked" are called with it held. Under it nothing is called in gate.c,
 * client.c or device.c, and of the driver only questions about pools.
 */
#ifndef SPRINGTIDE_MEMORY_ROOMS_H
#define SPRINGTIDE_MEMORY_ROOMS_H

#include "hooks.h"

/* How every hook begins. */
#define CALLS(symbol)                                                                                                  \
    if (!st_resolve() || st_real_##symbol == NULL) {                                                                   \
        return ST_MISSING;                                                                                             \
    }

/* --- memory_account.c --------------------------------------------------------------------------------------------- */

/* What this process holds of one device. Never freed. */
struct st_account {
    struct st_device *device;
    struct st_bucket *bucket; /* whose slot in the usage says `bytes`; NULL: nobody has to know */
    uint64_t bytes;
    uint64_t graph_bytes; /* of these: memory that graphs have on the device */
    bool has_graph_memory;
    CUcontext primary; /* the device's primary context, as it was in ... */
    uint32_t primary_epoch; /* ... this epoch of contexts, plus 1; 0: never asked */
};

void st_memory_lock(void);
void st_memory_unlock(void);
/* Whether memory is counted at all in this process. */
bool st_memory_is_counted(void);
/* The account of a device, as its bucket and its pools are now; NULL for no device, or where nothing is counted. Not
 * locked. */
struct st_account *st_account_of(struct st_device *device);
/* The same account, without a look at its bucket; NULL if nothing was ever held there. Locked. */
struct st_account *st_account_known(const struct st_device *device);
/* Take room for `bytes` more, if the tenant has it. Locked. */
bool st_account_take(struct st_account *account, uint64_t bytes);
/* Whether there is room for `bytes` more; takes nothing. Locked. */
bool st_account_has_room(struct st_account *account, uint64_t bytes);
/* What is held changed from `*held` to `now`, whatever the limit says. Locked. */
void st_account_settle(struct st_account *account, uint64_t *held, uint64_t now);
void st_account_give(struct st_account *account, uint64_t bytes);
/* An allocation was refused. */
void st_account_denied(struct st_account *account);
struct st_account *st_account_at(size_t index); /* NULL beyond the last one. Locked. */
/* Limit of the tenant of this bucket and what all its processes hold; whether there is a limit. */
bool st_memory_of_tenant(const struct st_bucket *bucket, uint64_t *limit_bytes, uint64_t *used_bytes);

/* --- memory_table.c ----------------------------------------------------------------------------------------------- */

enum st_held_kind {
    ST_HELD_NOTHING,
    ST_HELD_ADDRESS,  /* key: address. owner: context, or the pool that it came from */
    ST_HELD_ARRAY,    /* key: array or mipmapped array. owner: context */
    ST_HELD_EXTERNAL, /* key: imported memory. owner: context */
    ST_HELD_PHYSICAL, /* key: a number of ours. count: handles and mappings */
    ST_HELD_HANDLE,   /* key: handle of physical memory. owner: its number, count: how often it has to be released */
    ST_HELD_MAPPING,  /* key: address. owner: number of the physical memory */
};
struct st_held {
    enum st_held_kind kind;
    bool is_pooled;
    uint64_t key;
    struct st_account *account;
    uint64_t bytes;
    uint64_t owner;
    uint64_t count;
};
/* All locked. The entry that `find` returns is valid until the table changes. `put` takes the place of an entry of the
 * same key, and returns false where there is no memory. `next` goes through all of them, beginning with index 0; after
 * a `take` of what it returned the index has to go back by one, for another may have moved there. */
bool st_table_put(const struct st_held *held);
struct st_held *st_table_find(enum st_held_kind kind, uint64_t key);
bool st_table_take(enum st_held_kind kind, uint64_t key, struct st_held *held);
struct st_held *st_table_next(size_t *index);
void st_table_forked(void);

/* --- memory.c ----------------------------------------------------------------------------------------------------- */

/* Room taken before the driver is asked. */
struct st_claim {
    struct st_account *account;
    uint64_t bytes;
};
/* Returns whether the driver may be asked. */
bool st_claim_begin(struct st_claim *claim, struct st_device *device, uint64_t bytes);
/* After the driver's answer: what it gave is remembered, or the room given back. Returns `result`. */
CUresult st_claim_end(struct st_claim *claim, enum st_held_kind kind, uint64_t key, CUresult result);
/* Something is about to be freed: out of the table, but in the account until the driver has freed it. */
bool st_release_begin(struct st_held *held, enum st_held_kind kind, uint64_t key);
CUresult st_release_end(bool is_held, const struct st_held *held, CUresult result);
uint64_t st_times(uint64_t a, uint64_t b); /* UINT64_MAX where it is more */
uint64_t st_plus(uint64_t a, uint64_t b);

/* --- memory_pools.c ----------------------------------------------------------------------------------------------- */

/* Get back from the pools what they keep unused. Locked. */
void st_pools_reclaim(struct st_account *account);
/* An address from a pool was freed. Locked. */
void st_pool_freed(uint64_t pool, uint64_t bytes);
/* The device's primary context is gone. Locked. */
void st_pools_of_context_gone(struct st_account *account);
void st_pools_forked(void);
void st_nvml_forked(void);
/* Look again at what pools hold, if that may have changed since. A load and a branch where it has not. */
extern _Atomic bool st_memory_is_unsettled;
void st_memory_settle_slowly(void);
static inline void st_memory_settle(void) {
    if (ST_UNLIKELY(atomic_load_explicit(&st_memory_is_unsettled, memory_order_relaxed))) {
        st_memory_settle_slowly();
    }
}

#endif
