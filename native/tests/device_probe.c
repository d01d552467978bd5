/* A driver-API program that changes devices, contexts and processes as it is told, one line in, one line of JSON out.
 *
 *   create NAME ORDINAL     a context called by a letter, current afterwards; destroy NAME ends it
 *   primary NAME ORDINAL    the device's primary context; release ORDINAL and reset ORDINAL as the driver has them
 *   use NAME                makes it current; push NAME and pop; "use 0" makes none current
 *   launch NUMBER THREADS   so many launches in each of so many threads, in the context that is current
 *   alternate NUMBER A B    launches in A and B in turn
 *   fork                    goes on as a child; exec replaces the program by itself
 *   forks NUMBER            so many children, one after the other, each launching once, while other threads launch
 *   spawn                   a shell, by system()
 *   alloc BYTES, sleep MILLISECONDS, pid
 */
#define _GNU_SOURCE
#include "stub_api.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 64

static CUcontext contexts[128];
static CUfunction functions[128];
static char current = '0';
static char **arguments;
static _Atomic bool goes_on;

static CUresult make_function(char name) {
    CUmodule module;
    CUresult result = cuModuleLoadData(&module, "x");
    return result == CUDA_SUCCESS ? cuModuleGetFunction(&functions[(int)name], module, "layer@1000") : result;
}

static CUresult create(char name, int ordinal, bool is_primary) {
    CUdevice device;
    CUresult result = cuInit(0);
    if (result == CUDA_SUCCESS) {
        result = cuDeviceGet(&device, ordinal);
    }
    if (result == CUDA_SUCCESS && is_primary) {
        result = cuDevicePrimaryCtxRetain(&contexts[(int)name], device);
        if (result == CUDA_SUCCESS) {
            result = cuCtxSetCurrent(contexts[(int)name]);
        }
    } else if (result == CUDA_SUCCESS) {
        result = cuCtxCreate(&contexts[(int)name], NULL, 0, device);
    }
    if (result == CUDA_SUCCESS) {
        current = name;
        result = make_function(name);
    }
    return result;
}

struct order {
    long number;
    char name;
    CUresult result;
    double longest_s;
};

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static CUresult launch_once(char name) {
    return cuLaunchKernel(functions[(int)name], 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

static void *launch(void *which) {
    struct order *order = which;
    order->result = cuCtxSetCurrent(order->name == '0' ? NULL : contexts[(int)order->name]);
    for (long i = 0; i < order->number; i++) {
        double began_s = now_s();
        CUresult result = launch_once(order->name == '0' ? 'a' : order->name);
        if (order->result == CUDA_SUCCESS) {
            order->result = result;
        }
        double took_s = now_s() - began_s;
        order->longest_s = took_s > order->longest_s ? took_s : order->longest_s;
    }
    return NULL;
}

static CUresult launch_all(long number, int num_threads, double *longest_s) {
    static struct order orders[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < num_threads; i++) {
        orders[i] = (struct order){.number = number, .name = current};
        pthread_create(&threads[i], NULL, launch, &orders[i]);
    }
    *longest_s = 0.0;
    for (int i = 0; i < num_threads; i++) {
        pthread_join(threads[i], NULL);
        result = result == CUDA_SUCCESS ? orders[i].result : result;
        *longest_s = orders[i].longest_s > *longest_s ? orders[i].longest_s : *longest_s;
    }
    return result;
}

static CUresult alternate(long number, char one, char other) {
    CUresult result = CUDA_SUCCESS;
    for (long i = 0; i < number && result == CUDA_SUCCESS; i++) {
        char name = i % 2 == 0 ? one : other;
        result = cuCtxSetCurrent(contexts[(int)name]);
        result = result == CUDA_SUCCESS ? launch_once(name) : result;
    }
    return result;
}

static void *launch_on(void *unused) {
    (void)unused;
    cuCtxSetCurrent(contexts[(int)current]);
    while (goes_on) {
        launch_once(current);
    }
    return NULL;
}

/* Children at moments at which other threads of the parent are anywhere in the library. */
static int fork_often(int number) {
    pthread_t threads[2];
    goes_on = true;
    for (int i = 0; i < 2; i++) {
        pthread_create(&threads[i], NULL, launch_on, NULL);
    }
    int num_well = 0;
    for (int i = 0; i < number; i++) {
        pid_t child = fork();
        if (child == 0) {
            CUresult result = create('z', 0, false);
            result = result == CUDA_SUCCESS ? launch_once('z') : result;
            _exit(result == CUDA_SUCCESS ? 0 : 1);
        }
        int status = 0;
        waitpid(child, &status, 0);
        num_well += WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    goes_on = false;
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    return num_well;
}

static CUresult change(const char *word, char name, int ordinal) {
    CUresult result = CUDA_ERROR_UNKNOWN;
    CUcontext context = name == '0' ? NULL : contexts[(int)name];
    if (strcmp(word, "create") == 0 || strcmp(word, "primary") == 0) {
        result = create(name, ordinal, word[0] == 'p');
    } else if (strcmp(word, "use") == 0) {
        current = name;
        result = cuCtxSetCurrent(context);
    } else if (strcmp(word, "push") == 0) {
        current = name;
        result = cuCtxPushCurrent(context);
    } else if (strcmp(word, "destroy") == 0) {
        result = cuCtxDestroy(context);
    } else if (strcmp(word, "release") == 0) {
        result = cuDevicePrimaryCtxRelease(name - '0');
    } else if (strcmp(word, "reset") == 0) {
        result = cuDevicePrimaryCtxReset(name - '0');
    } else if (strcmp(word, "pop") == 0) {
        result = cuCtxPopCurrent(&context);
        current = name;
    }
    return result;
}

static void go_on_as_child(void) {
    pid_t child = fork();
    if (child > 0) {
        int status = 0;
        waitpid(child, &status, 0);
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 99);
    }
}

static void obey(const char *line) {
    char word[32] = "", name = '0', other = '0';
    long number = 0;
    int more = 0;
    double longest_s = 0.0;
    CUresult result = CUDA_SUCCESS;
    if (sscanf(line, "launch %ld %d", &number, &more) == 2) {
        result = launch_all(number, more, &longest_s);
    } else if (sscanf(line, "alternate %ld %c %c", &number, &name, &other) == 3) {
        result = alternate(number, name, other);
    } else if (sscanf(line, "forks %d", &more) == 1) {
        number = fork_often(more);
    } else if (sscanf(line, "sleep %ld", &number) == 1) {
        usleep((useconds_t)number * 1000);
    } else if (sscanf(line, "alloc %ld", &number) == 1) {
        CUdeviceptr pointer;
        result = cuMemAlloc(&pointer, (size_t)number);
    } else if (strncmp(line, "exec", 4) == 0) {
        execv("/proc/self/exe", arguments);
    } else if (strncmp(line, "spawn", 5) == 0) {
        number = system("exit 7") == 7 << 8;
    } else if (strncmp(line, "fork", 4) == 0) {
        go_on_as_child();
    } else if (sscanf(line, "%31s %c %d", word, &name, &more) >= 2) {
        result = change(word, name, more);
    }
    printf("{\"result\": %d, \"number\": %ld, \"pid\": %ld, \"longest_s\": %.6f, \"context\": %llu}\n", (int)result, number,
           (long)getpid(), longest_s, (unsigned long long)(uintptr_t)contexts[(int)current]);
    fflush(stdout);
}

int main(int argc, char **argv) {
    (void)argc;
    arguments = argv;
    setvbuf(stdin, NULL, _IONBF, 0); /* a program that replaces itself leaves the rest of its lines to the next */
    char line[256];
    while (fgets(line, sizeof line, stdin) != NULL) {
        obey(line);
    }
    return 0;
}
