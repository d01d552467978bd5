/* Looks the driver's functions up in every way there is, as it is told line by line, and says whose they are.
 *
 *   get API VERSION FLAGS       cuGetProcAddress_v2, found by dlsym; get4: the older form of four parameters
 *   sym PLACE NAME              dlsym; PLACE is driver, default, next, self (the program's own handle) or opened
 *   vsym PLACE NAME VERSION     dlvsym
 *   open PATH                   opens a library: "opened"; opendeep: with RTLD_DEEPBIND
 *   call FUNCTION NAME          the opened library's `void *FUNCTION(const char *)`
 *   launch PLACE                launches once through the cuLaunchKernel found there, and says the result
 * Each is answered by one line of JSON; "owner" is the object that a function lies in, null if nothing was found.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *driver, *opened;

static void say(int result, int status, const void *address) {
    Dl_info info;
    const char *error = dlerror();
    printf("{\"result\": %d, \"status\": %d, \"has_error\": %s, ", result, status, error != NULL ? "true" : "false");
    if (address != NULL && dladdr(address, &info) != 0) {
        const char *slash = strrchr(info.dli_fname, '/');
        printf("\"owner\": \"%s\", ", slash != NULL ? slash + 1 : info.dli_fname);
        printf("\"symbol\": \"%s\"}\n", info.dli_sname != NULL && info.dli_saddr == address ? info.dli_sname : "?");
    } else {
        printf("\"owner\": null, \"symbol\": null}\n");
    }
    fflush(stdout);
}

static void *place(const char *name) {
    if (strcmp(name, "driver") == 0) {
        return driver;
    }
    if (strcmp(name, "opened") == 0) {
        return opened;
    }
    if (strcmp(name, "self") == 0) {
        return dlopen(NULL, RTLD_LAZY);
    }
    return strcmp(name, "next") == 0 ? RTLD_NEXT : RTLD_DEFAULT;
}

static void get(const char *api, const char *version, const char *flags) {
    __typeof__(&cuGetProcAddress_v2) ask = (__typeof__(ask))dlsym(driver, "cuGetProcAddress_v2");
    CUdriverProcAddressQueryResult status = (CUdriverProcAddressQueryResult)-1;
    void *address = NULL;
    int result = ask == NULL ? -1 : (int)ask(api, &address, atoi(version), strtoull(flags, NULL, 10), &status);
    say(result, (int)status, address);
}

static void get4(const char *api, const char *version, const char *flags) {
    __typeof__(&cuGetProcAddress) ask = (__typeof__(ask))dlsym(driver, "cuGetProcAddress");
    void *address = NULL;
    int result = ask == NULL ? -1 : (int)ask(api, &address, atoi(version), strtoull(flags, NULL, 10));
    say(result, -1, address);
}

static void launch(void *handle) {
    __typeof__(&cuLaunchKernel) run = (__typeof__(run))dlsym(handle, "cuLaunchKernel");
    say(run == NULL ? -1 : (int)run(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), -1, NULL);
}

int main(void) {
    char line[1024], verb[32], words[3][512];
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    dlerror();
    while (fgets(line, sizeof line, stdin) != NULL) {
        memset(words, 0, sizeof words);
        if (sscanf(line, "%31s %511s %511s %511s", verb, words[0], words[1], words[2]) < 2) {
            return 2;
        }
        if (strcmp(verb, "get") == 0) {
            get(words[0], words[1], words[2]);
        } else if (strcmp(verb, "get4") == 0) {
            get4(words[0], words[1], words[2]);
        } else if (strcmp(verb, "sym") == 0) {
            say(0, -1, dlsym(place(words[0]), words[1]));
        } else if (strcmp(verb, "vsym") == 0) {
            say(0, -1, dlvsym(place(words[0]), words[1], words[2]));
        } else if (strncmp(verb, "open", 4) == 0) {
            opened = dlopen(words[0], RTLD_NOW | (strcmp(verb, "opendeep") == 0 ? RTLD_DEEPBIND : 0));
            say(opened != NULL ? 0 : 1, -1, NULL);
        } else if (strcmp(verb, "call") == 0) {
            void *(*function)(const char *) = (void *(*)(const char *))dlsym(opened, words[0]);
            say(0, -1, function == NULL ? NULL : function(words[1]));
        } else if (strcmp(verb, "launch") == 0) {
            launch(place(words[0]));
        } else {
            return 3;
        }
    }
    return 0;
}
