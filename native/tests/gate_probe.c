/* The gate and the client by themselves, without a driver: does what it is told, one line in, one line of JSON out.
 *
 *   launch NUMBER COST_NS THREADS   so many launches in each of so many threads
 *   refund COST_NS                  one launch that fails
 *   bucket                          the bucket, as others than launches ask for it
 *   fork                            goes on as a child; the parent ends with the child's status
 *   interrupt MILLISECONDS          from now on a signal every so often, 0: no more
 *   descriptors                     how many are open, with the mappings and the memory that is in use
 *   patience                        the time until the next question is over
 *   sleep MILLISECONDS
 * The device has the UUID of the first argument.
 */
#include "client.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_THREADS 64

static struct st_device device;
static _Atomic unsigned num_signals;
static _Atomic unsigned num_attached;

/* What memory.c would do; here only seen. */
void st_memory_attached(struct st_device *whose, struct st_bucket *bucket) {
    if (atomic_load(&whose->bucket) == bucket) {
        atomic_fetch_add(&num_attached, 1);
        atomic_store(&bucket->process->memory_bytes, 4096);
    }
}

struct order {
    long num_launches;
    uint64_t cost_ns;
    uint64_t longest_ns;
    long num_charged;
    int errno_after;
};

static void *launch(void *which) {
    struct order *order = which;
    errno = 77;
    for (long i = 0; i < order->num_launches; i++) {
        uint64_t began_ns = st_now_ns();
        if (st_gate(&device, order->cost_ns) != NULL) {
            order->num_charged++;
        }
        uint64_t waited_ns = st_now_ns() - began_ns;
        order->longest_ns = waited_ns > order->longest_ns ? waited_ns : order->longest_ns;
    }
    order->errno_after = errno;
    return NULL;
}

static void launch_all(long num_launches, uint64_t cost_ns, int num_threads) {
    static struct order orders[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    num_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    uint64_t began_ns = st_now_ns();
    for (int i = 0; i < num_threads; i++) {
        orders[i] = (struct order){.num_launches = num_launches, .cost_ns = cost_ns};
        if (pthread_create(&threads[i], NULL, launch, &orders[i]) != 0) {
            abort();
        }
    }
    uint64_t longest_ns = 0;
    long num_charged = 0;
    bool keeps_errno = true;
    for (int i = 0; i < num_threads; i++) {
        pthread_join(threads[i], NULL);
        longest_ns = orders[i].longest_ns > longest_ns ? orders[i].longest_ns : longest_ns;
        num_charged += orders[i].num_charged;
        keeps_errno = keeps_errno && orders[i].errno_after == 77;
    }
    printf("{\"longest_ns\": %llu, \"total_ns\": %llu, \"charged\": %ld, \"keeps_errno\": %s, \"signals\": %u}\n",
           (unsigned long long)longest_ns, (unsigned long long)(st_now_ns() - began_ns), num_charged,
           keeps_errno ? "true" : "false", atomic_load(&num_signals));
}

static void show_bucket(void) {
    struct st_bucket *bucket = st_bucket_of(&device);
    if (bucket == NULL) {
        printf("{\"segment\": null, \"attached\": %u}\n", atomic_load(&num_attached));
        return;
    }
    printf("{\"segment\": %llu, \"slot\": %ld, \"attached\": %u}\n", (unsigned long long)bucket->grant->segment_id,
           (long)(bucket->process - bucket->usage->processes), atomic_load(&num_attached));
}

static void show_descriptors(void) {
    DIR *folder = opendir("/proc/self/fd");
    int count = -1; /* the folder itself */
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        count += entry->d_name[0] != '.';
    }
    closedir(folder);
    int num_mappings = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    for (int c = fgetc(maps); c != EOF; c = fgetc(maps)) {
        num_mappings += c == '\n';
    }
    fclose(maps);
    long num_pages = 0;
    long num_resident = 0;
    FILE *sizes = fopen("/proc/self/statm", "r");
    if (fscanf(sizes, "%ld %ld", &num_pages, &num_resident) != 2) {
        abort();
    }
    fclose(sizes);
    long page_kib = sysconf(_SC_PAGESIZE) / 1024;
    printf("{\"open\": %d, \"mappings\": %d, \"resident_kib\": %ld, \"virtual_kib\": %ld}\n", count, num_mappings,
           num_resident * page_kib, num_pages * page_kib);
}

static void heard(int number) {
    (void)number;
    atomic_fetch_add(&num_signals, 1);
}

static void interrupt_every(long milliseconds) {
    /* Without SA_RESTART: every system call that can be interrupted is. */
    struct sigaction action = {.sa_handler = heard};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval every = {{0, milliseconds * 1000}, {0, milliseconds * 1000}};
    setitimer(ITIMER_REAL, &every, NULL);
    printf("{}\n");
}

/* The child does what device.c does for it in the library. */
static void go_on_as_child(void) {
    fflush(stdout);
    pid_t child = fork();
    if (child > 0) {
        int status = 0;
        waitpid(child, &status, 0);
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 99);
    }
    atomic_store(&device.bucket, NULL);
    atomic_store(&device.ask_again_ns, 0);
    st_client_forked();
    st_gate_forked();
    printf("{\"pid\": %ld}\n", (long)getpid());
}

static bool obey(const char *line) {
    long number = 0;
    unsigned long long cost_ns = 0;
    int num_threads = 1;
    if (sscanf(line, "launch %ld %llu %d", &number, &cost_ns, &num_threads) == 3) {
        launch_all(number, cost_ns, num_threads);
    } else if (sscanf(line, "refund %llu", &cost_ns) == 1) {
        st_gate_refund(st_gate(&device, cost_ns), cost_ns);
        printf("{}\n");
    } else if (sscanf(line, "interrupt %ld", &number) == 1) {
        interrupt_every(number);
    } else if (sscanf(line, "sleep %ld", &number) == 1) {
        usleep((useconds_t)number * 1000);
        printf("{}\n");
    } else if (strncmp(line, "patience", 8) == 0) {
        atomic_store(&device.ask_again_ns, 1);
        printf("{}\n");
    } else if (strncmp(line, "bucket", 6) == 0) {
        show_bucket();
    } else if (strncmp(line, "descriptors", 11) == 0) {
        show_descriptors();
    } else if (strncmp(line, "fork", 4) == 0) {
        go_on_as_child();
    } else {
        return false;
    }
    fflush(stdout);
    return true;
}

int main(int argc, char **argv) {
    if (argc != 2 || strlen(argv[1]) != 2 * ST_UUID_BYTES) {
        return 2;
    }
    for (int i = 0; i < ST_UUID_BYTES; i++) {
        unsigned int byte = 0;
        sscanf(argv[1] + 2 * i, "%2x", &byte);
        device.uuid[i] = (uint8_t)byte;
    }
    char line[256];
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (!obey(line)) {
            return 3;
        }
    }
    return 0;
}
