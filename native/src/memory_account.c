/* How much this process holds of each device, and whether the tenant has room for more.
 *
 * Each process of a tenant writes what it holds into its own slot of the usage; what the tenant holds is the sum, and
 * a process that dies is out of it as soon as the daemon clears its slot. Whoever wants more writes it into its slot
 * first and adds up then: of two processes that come at once at least one sees the other, so the limit is never passed.
 * That both see each other and both give up, where one of them would have had room, is what the turn word is for:
 * whoever has it adds up alone. It is a hint and no lock: one who died with it is not waited for, one who was stopped
 * with it half a second, once.
 */
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "client.h"
#include "memory_rooms.h"

#define MAX_ACCOUNTS 64
#define NUM_YIELDS 100
#define NAP_NS 50000
#define PATIENCE_NS 500000000u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct st_account accounts[MAX_ACCOUNTS];
static size_t num_accounts;

void st_memory_lock(void) {
    pthread_mutex_lock(&lock);
}

void st_memory_unlock(void) {
    pthread_mutex_unlock(&lock);
}

bool st_memory_is_counted(void) {
    return st_client_has_daemon();
}

/* --- one tenant's memory --- */

static uint64_t sum_of(const struct st_usage *usage) {
    uint64_t sum = 0;
    for (size_t i = 0; i < ST_NUM_PROCESSES; i++) {
        if (atomic_load(&usage->processes[i].pid) != 0) {
            sum = st_plus(sum, atomic_load(&usage->processes[i].memory_bytes));
        }
    }
    return sum;
}

bool st_memory_of_tenant(const struct st_bucket *bucket, uint64_t *limit_bytes, uint64_t *used_bytes) {
    *limit_bytes = atomic_load_explicit(&bucket->grant->memory_limit_bytes, memory_order_relaxed);
    *used_bytes = sum_of(bucket->usage);
    return *limit_bytes != 0;
}

static uint64_t turn_number(const struct st_bucket *bucket) {
    return (uint64_t)(bucket->process - bucket->usage->processes) + 1;
}

/* Whether nobody lives in this slot; the daemon clears those of the dead. */
static bool is_nobody(const struct st_bucket *bucket, uint64_t slot) {
    if (slot == 0 || slot > ST_NUM_PROCESSES) {
        return true;
    }
    return atomic_load(&bucket->usage->processes[slot - 1].pid) == 0;
}

static void turn_take(const struct st_bucket *bucket) {
    _Atomic uint64_t *turn = &bucket->usage->memory_turn;
    uint64_t mine = turn_number(bucket);
    uint64_t began_ns = 0;
    for (int i = 0;; i++) {
        uint64_t whose = atomic_load(turn);
        if (is_nobody(bucket, whose) && atomic_compare_exchange_strong(turn, &whose, mine)) {
            return;
        }
        uint64_t now_ns = st_now_ns();
        began_ns = began_ns == 0 ? now_ns : began_ns;
        if (now_ns - began_ns > PATIENCE_NS) {
            break;
        }
        if (i < NUM_YIELDS) {
            sched_yield();
        } else {
            const struct timespec nap = {.tv_nsec = NAP_NS};
            nanosleep(&nap, NULL);
        }
    }
    /* Stopped in the middle of it, for all that can be seen. */
    atomic_store(turn, mine);
}

static void turn_give(const struct st_bucket *bucket) {
    uint64_t mine = turn_number(bucket);
    atomic_compare_exchange_strong(&bucket->usage->memory_turn, &mine, 0);
}

/* --- accounts --- */

static void tell(const struct st_account *account) {
    if (account->bucket != NULL) {
        atomic_store(&account->bucket->process->memory_bytes, account->bytes);
    }
}

struct st_account *st_account_known(const struct st_device *device) {
    for (size_t i = 0; i < num_accounts; i++) {
        if (accounts[i].device == device) {
            return &accounts[i];
        }
    }
    return NULL;
}

static struct st_account *find_or_make(struct st_device *device) {
    struct st_account *account = st_account_known(device);
    if (account != NULL || num_accounts == MAX_ACCOUNTS) {
        return account;
    }
    accounts[num_accounts] = (struct st_account){.device = device};
    return &accounts[num_accounts++];
}

struct st_account *st_account_of(struct st_device *device) {
    if (device == NULL || !st_memory_is_counted()) {
        return NULL;
    }
    struct st_bucket *bucket = st_bucket_of(device);
    st_memory_lock();
    struct st_account *account = find_or_make(device);
    if (account != NULL && account->bucket != bucket) {
        account->bucket = bucket;
        tell(account);
    }
    st_memory_unlock();
    st_memory_settle();
    return account;
}

struct st_account *st_account_at(size_t index) {
    return index < num_accounts ? &accounts[index] : NULL;
}

void st_memory_attached(struct st_device *device, struct st_bucket *bucket) {
    st_memory_lock();
    struct st_account *account = find_or_make(device);
    if (account != NULL) {
        account->bucket = bucket;
        tell(account);
    }
    st_memory_unlock();
}

bool st_account_take(struct st_account *account, uint64_t bytes) {
    const struct st_bucket *bucket = account->bucket;
    uint64_t before = account->bytes;
    account->bytes = st_plus(before, bytes);
    if (bucket == NULL || bytes == 0 || atomic_load(&bucket->grant->memory_limit_bytes) == 0) {
        tell(account);
        return true;
    }
    uint64_t limit, used;
    turn_take(bucket);
    tell(account);
    bool has_room = !st_memory_of_tenant(bucket, &limit, &used) || used <= limit;
    if (!has_room) {
        account->bytes = before;
        tell(account);
    }
    turn_give(bucket);
    return has_room;
}

bool st_account_has_room(struct st_account *account, uint64_t bytes) {
    uint64_t limit, used;
    return account->bucket == NULL || !st_memory_of_tenant(account->bucket, &limit, &used) ||
           st_plus(used, bytes) <= limit;
}

void st_account_give(struct st_account *account, uint64_t bytes) {
    account->bytes -= bytes < account->bytes ? bytes : account->bytes;
    tell(account);
}

void st_account_settle(struct st_account *account, uint64_t *held, uint64_t now) {
    if (now > *held) {
        account->bytes = st_plus(account->bytes, now - *held);
        tell(account);
    } else if (now < *held) {
        st_account_give(account, *held - now);
    }
    *held = now;
}

void st_account_denied(struct st_account *account) {
    if (account->bucket != NULL) {
        atomic_fetch_add_explicit(&account->bucket->usage->num_denied, 1, memory_order_relaxed);
    }
}

void st_memory_forked(void) {
    /* What is held is the parent's. Its threads are not here, whoever of them had the lock. */
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    num_accounts = 0;
    st_table_forked();
    st_pools_forked();
    st_nvml_forked();
}
