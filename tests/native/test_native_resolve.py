"""However a program looks for the driver's functions: ours in place of the hooked ones, and nothing else is new."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kits.native.native_build import NATIVE, Native, headers_version
from kits.native.resolve_kit import DRIVER, OURS, Entry, ask, build_shared, hooks, read_table, symbols_of

VERSIONS = (
    2000,
    3020,
    4000,
    6050,
    7000,
    9000,
    10000,
    11000,
    11020,
    11030,
    11060,
    12000,
    12030,
    12080,
    13000,
    13010,
    13050,
)
FLAGS = (0, 1, 2)
# Every call with which a program can have a kernel run.
LAUNCHES = re.compile(
    r"CUDAAPI (cu(?:Launch(?:Grid|GridAsync|Kernel|KernelEx|CooperativeKernel|CooperativeKernelMultiDevice)?"
    r"|GraphLaunch)(?:_v\d+)?)\("
)


@pytest.fixture(scope="module")
def hooked(native: Native) -> list[Entry]:
    return hooks(native)


# --- the tables -----------------------------------------------------------------------------------------------------


def test_every_launch_of_the_header_is_hooked_with_its_twin(native: Native, hooked: list[Entry]) -> None:
    text = (native.headers / "cuda.h").read_text(encoding="utf-8")
    known = {entry.symbol for entry in hooked}
    launches = set(LAUNCHES.findall(text))
    assert {"cuLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch", "cuLaunchGridAsync"} <= launches
    assert launches <= known
    twins = {f"{name}_ptsz" for name in launches if re.search(rf"__CUDA_API_PTSZ\({name}\)", text)}
    assert {"cuLaunchKernel_ptsz", "cuLaunchKernelEx_ptsz", "cuGraphLaunch_ptsz"} <= twins
    assert twins <= known


def test_versions_and_twins_are_those_of_the_headers(native: Native, hooked: list[Entry]) -> None:
    text = (native.headers / "cudaTypedefs.h").read_text(encoding="utf-8")
    typedefs = set(re.findall(r"\bPFN_(\w+)\)", text))
    renamed = set(re.findall(r"#define (cu\w+) +(cu\w+)", (native.headers / "cuda.h").read_text(encoding="utf-8")))
    for entry in hooked:
        suffixes = ("_ptsz", "_ptds") if entry.is_per_thread else ("",)
        wanted = {f"{entry.api}_v{entry.since}{suffix}" for suffix in suffixes}
        is_other_name = (entry.api, entry.symbol) in renamed and entry.api not in entry.symbol.split("_")
        assert wanted & typedefs or is_other_name, f"{entry}: no PFN_ of {wanted}"
        assert entry.symbol.endswith(("_ptsz", "_ptds")) == entry.is_per_thread, entry


def test_nothing_is_hooked_twice(hooked: list[Entry]) -> None:
    assert len({(entry.api, entry.since, entry.is_per_thread) for entry in hooked}) == len(hooked)


# --- cuGetProcAddress -----------------------------------------------------------------------------------------------


def test_the_drivers_answers_stand_and_hooked_functions_are_ours(native: Native, hooked: list[Entry]) -> None:
    stub = read_table(NATIVE / "stub" / "stub_functions.def", headers_version(native.headers))
    names = sorted({entry.api for entry in stub})
    assert {entry.api for entry in hooked} & set(names) >= {"cuLaunchKernel", "cuMemAlloc", "cuGraphLaunch"}
    # Names that are not there, among them those that only an export has.
    names += ["cuNothing", "cuLaunchKernel_ptsz", "cuMemAlloc_v2", "dlsym", ""]
    lines = [f"get {name or '-'} {version} {flag}" for name in names for version in VERSIONS for flag in FLAGS]
    lines += ["get cuLaunchKernel 12000 3", "get cuLaunchKernel 12000 64"]
    bare, ours = ask(native, lines, preload=False), ask(native, lines)
    symbols = {entry.symbol for entry in hooked}
    num_ours = 0
    for line, driver, found in zip(lines, bare, ours, strict=True):
        assert (found.result, found.status, found.symbol) == (driver.result, driver.status, driver.symbol), line
        is_ours = driver.symbol in symbols
        num_ours += is_ours
        assert found.owner == (None if driver.owner is None else OURS if is_ours else DRIVER), line
    assert num_ours > 1000


@pytest.mark.parametrize(
    ("question", "symbol"),
    [
        ("cuLaunchKernel 4000 0", "cuLaunchKernel"),
        ("cuLaunchKernel 6999 2", "cuLaunchKernel"),
        ("cuLaunchKernel 7000 2", "cuLaunchKernel_ptsz"),
        ("cuLaunchKernel 13000 1", "cuLaunchKernel"),
        ("cuLaunchKernelEx 11060 2", "cuLaunchKernelEx_ptsz"),
        ("cuMemAlloc 3019 0", "cuMemAlloc"),
        ("cuMemAlloc 3020 2", "cuMemAlloc_v2"),
        ("cuGetProcAddress 11030 0", "cuGetProcAddress"),
        ("cuGetProcAddress 11999 2", "cuGetProcAddress"),
        ("cuGetProcAddress 12000 2", "cuGetProcAddress_v2"),
    ],
)
def test_version_and_flags_choose_ours(native: Native, question: str, symbol: str) -> None:
    for verb in ("get", "get4"):
        (found,) = ask(native, [f"{verb} {question}"])
        assert (found.result, found.owner, found.symbol) == (0, OURS, symbol)


def test_what_the_driver_does_not_have_is_not_there(native: Native) -> None:
    newer, absent = ask(native, ["get cuLaunchKernelEx 11050 0", "get cuNothing 13000 0"])
    assert (newer.owner, newer.status) == (None, 2)  # CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
    assert (absent.owner, absent.status) == (None, 1)  # CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND


def test_an_older_driver_is_asked_in_its_own_way(native: Native) -> None:
    lines = ["sym driver cuGetProcAddress_v2", "sym default cuGetProcAddress_v2", "sym driver cuLaunchKernelEx"]
    lines += ["get4 cuLaunchKernel 7000 2", "sym driver cuLaunchKernel_ptsz"]
    second, second_anywhere, extended, launch, named = ask(native, lines, stub=native.old_stub_dir)
    for found in (second, second_anywhere, extended):
        assert found.owner is None
    assert (launch.owner, launch.symbol) == (OURS, "cuLaunchKernel_ptsz")
    assert (named.owner, named.symbol) == (OURS, "cuLaunchKernel_ptsz")
    lines = [
        "sym driver cuGetProcAddress",
        "sym driver cuLaunchKernel",
        "sym driver cuMemAlloc_v2",
        "sym driver cuInit",
    ]
    asked, launch, memory, init = ask(native, lines, stub=native.ancient_stub_dir)
    assert asked.owner is None
    assert (launch.owner, memory.owner, init.owner) == (OURS, OURS, DRIVER)


NEWER_DRIVER = """
#include <string.h>
typedef int CUresult;
typedef unsigned long long flags_t;
CUresult cuInit(unsigned flags) { return 0; }
CUresult cuLaunchKernel(void) { return 0; }
static CUresult of_the_future(int with, int other, int parameters) { return 0; }
static CUresult by_another_address(void) { return 0; }
CUresult cuGraphLaunch(void) { return 0; }
CUresult cuGetProcAddress_v2(const char *name, void **address, int version, flags_t flags, int *status) {
    *address = NULL;
    if (strcmp(name, "cuLaunchKernel") == 0) {
        *address = version >= 99000 ? (void *)of_the_future : (void *)cuLaunchKernel;
    } else if (strcmp(name, "cuGraphLaunch") == 0) {
        *address = (void *)by_another_address;
    }
    *status = *address == NULL;
    return *address == NULL ? 500 : 0;
}
"""


def test_a_function_of_a_newer_driver_is_left_alone(native: Native, tmp_path: Path) -> None:
    """It may have other parameters than ours of the same name; but the same function by another address is ours."""
    build_shared(native, tmp_path / DRIVER, NEWER_DRIVER)
    lines = ["get cuLaunchKernel 99000 0", "get cuLaunchKernel 98000 0", "get cuGraphLaunch 99000 0"]
    newer, known, moved = ask(native, lines, stub=tmp_path)
    assert (newer.result, newer.owner) == (0, DRIVER)
    assert (known.owner, known.symbol) == (OURS, "cuLaunchKernel")
    assert (moved.owner, moved.symbol) == (OURS, "cuGraphLaunch")


# --- dlsym and dlvsym -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", [(), ("-lcuda",)], ids=["opened", "linked"])
def test_dlsym_finds_ours_from_everywhere(native: Native, links: tuple[str, ...]) -> None:
    names = ("cuLaunchKernel", "cuLaunchKernel_ptsz", "cuGraphLaunch", "cuMemAlloc_v2", "cuGetProcAddress_v2")
    for place in ("driver", "default", "next", "self"):
        lines = [f"sym {place} {name}" for name in names]
        for name, found in zip(names, ask(native, lines, links=["-Wl,--no-as-needed", *links]), strict=True):
            assert (found.owner, found.symbol, found.has_error) == (OURS, name, False), place


def test_dlsym_finds_what_it_always_found(native: Native) -> None:
    places = ("driver", "default", "next", "self")
    names = ("cuInit", "cuNothing", "stub_calls", "malloc", "dlopen", "nothing", "cudaMalloc")
    lines = [f"sym {place} {name}" for place in places for name in names]
    lines += [f"vsym {place} {name} GLIBC_2.2.5" for place in places for name in ("malloc", "cuInit", "nothing")]
    assert ask(native, lines) == ask(native, lines, preload=False)


def test_dlvsym_finds_ours(native: Native, tmp_path: Path) -> None:
    """A driver whose symbols have versions, as some distributions' do."""
    script = tmp_path / "versions.map"
    script.write_text("DRIVER_1 { global: cu*; };\n", encoding="utf-8")
    build_shared(native, tmp_path / DRIVER, NEWER_DRIVER, links=[f"-Wl,--version-script={script}"])
    lines = [
        "vsym driver cuLaunchKernel DRIVER_1",
        "vsym driver cuInit DRIVER_1",
        "vsym driver cuLaunchKernel DRIVER_2",
    ]
    launch, init, other = ask(native, lines, stub=tmp_path)
    assert (launch.owner, launch.symbol, launch.has_error) == (OURS, "cuLaunchKernel", False)
    assert (init.owner, other.owner, other.has_error) == (DRIVER, None, True)


@pytest.mark.parametrize("name", ["dlsym", "dlvsym"])
def test_nobody_gets_past_us_through_the_c_library(native: Native, tmp_path: Path, name: str) -> None:
    """Who looks for the C library's own dlsym, as other preloads do, is given ours."""
    text = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    void *plainly(const char *name) { return dlsym(dlopen("libc.so.6", RTLD_LAZY), name); }
    void *by_version(const char *name) { return dlvsym(dlopen("libc.so.6", RTLD_LAZY), name, "GLIBC_2.2.5"); }
    void *by_dlvsym(const char *name) {
        void *(*find)(void *, const char *) = dlvsym(dlopen("libc.so.6", RTLD_LAZY), "dlsym", "GLIBC_2.2.5");
        return find(dlopen("libcuda.so.1", RTLD_LAZY), "cuLaunchKernel");
    }
    """
    library = build_shared(native, tmp_path / "libasks.so", text)
    lines = [f"open {library}", f"call plainly {name}", f"call by_version {name}", f"call by_dlvsym {name}"]
    _, plain, versioned, launch = ask(native, lines)
    assert (plain.owner, plain.symbol) == (OURS, name)
    assert (versioned.owner, versioned.symbol) == (OURS, name)
    assert (launch.owner, launch.symbol) == (OURS, "cuLaunchKernel")


def test_next_is_next_after_the_caller(native: Native, tmp_path: Path) -> None:
    """Preloads that stack up, as allocators and profilers do, find each other and not themselves."""
    text = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stddef.h>
    const char *who(void) { return "%s"; }
    void *after_%s(const char *name) { return dlsym(RTLD_NEXT, name); }
    """
    first = build_shared(native, tmp_path / "libfirst.so", text % ("first", "first"))
    second = build_shared(native, tmp_path / "libsecond.so", text % ("second", "second"))
    lines = ["open libfirst.so", "call after_first who", "open libsecond.so", "call after_second who", "sym next who"]
    expected = [None, "libsecond.so", None, None, "libfirst.so"]
    for before, after in (((first,), (second,)), ((), (first, second)), ((first, second), ())):
        found = ask(native, lines, before=before, after=after)
        assert [each.owner for each in found] == expected
        assert found == ask(native, lines, preload=False, before=before, after=after)


def test_next_from_behind_us_does_not_lead_past_us(native: Native, tmp_path: Path) -> None:
    text = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    void *next(const char *name) { return dlsym(RTLD_NEXT, name); }
    """
    library = build_shared(
        native, tmp_path / "libbehind.so", text, links=[f"-L{native.stub_dir}", "-Wl,--no-as-needed", "-lcuda"]
    )
    lines = [f"open {library}", "call next cuLaunchKernel", "call next cuInit"]
    _, bare, _ = ask(native, lines, preload=False)
    assert bare.owner == DRIVER
    _, launch, init = ask(native, lines)
    assert (launch.owner, launch.symbol) == (OURS, "cuLaunchKernel")
    assert init.owner == DRIVER


WRAPPER = """
#define _GNU_SOURCE
#include <dlfcn.h>
int num_wrapped;
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned s, void *t,
                   void **p, void **x) {
    int (*next)() = (int (*)())dlsym(RTLD_NEXT, "cuLaunchKernel");
    num_wrapped++;
    return next == 0 ? -77 : next(f, a, b, c, d, e, g, s, t, p, x);
}
"""


@pytest.mark.parametrize("is_before", [True, False])
def test_others_that_wrap_launches_still_do(native: Native, tmp_path: Path, is_before: bool) -> None:
    wrapper = build_shared(native, tmp_path / "libwrapper.so", WRAPPER)
    around = {"before": [wrapper]} if is_before else {"after": [wrapper]}
    (default, driver, launched) = ask(
        native, ["sym default cuLaunchKernel", "sym driver cuLaunchKernel", "launch default"], **around
    )
    assert default.owner == ("libwrapper.so" if is_before else OURS)
    assert driver.owner == OURS
    assert launched.result not in (-77, -1, 801, 0)  # the driver itself refused a launch without a context


SELF_ASKING_DRIVER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
static int num_launches;
int cuInit(unsigned flags) { return 0; }
int cuLaunchKernel(void) { return ++num_launches == 1 ? 4242 : 4343; }
int cuLaunchKernel_ptsz(void) { return cuLaunchKernel(); }
int cuGetProcAddress_v2(const char *name, void **address, int version, unsigned long long flags, int *status) {
    *address = dlsym(RTLD_DEFAULT, name);
    if (*address == NULL) { *address = dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), name); }
    *status = *address == NULL;
    return *address == NULL ? 500 : 0;
}
void *later(const char *name) { return dlsym(RTLD_DEFAULT, name); }
__attribute__((constructor)) static void begin(void) {
    void *address;
    int status;
    cuGetProcAddress_v2("cuLaunchKernel", &address, 12000, 0, &status);
}
"""


def test_a_driver_may_look_itself_up(native: Native, tmp_path: Path) -> None:
    """With dlsym, from its constructor or within cuGetProcAddress: it finds itself, and nobody goes in circles."""
    build_shared(native, tmp_path / DRIVER, SELF_ASKING_DRIVER)
    lines = ["get cuLaunchKernel 12000 0", "get cuInit 12000 0", "launch driver"]
    lines += [f"open {DRIVER}", "call later cuLaunchKernel"]
    launch, init, launched, _, later = ask(native, lines, stub=tmp_path)
    assert (launch.result, launch.owner, launch.symbol) == (0, OURS, "cuLaunchKernel")
    assert init.owner == DRIVER
    assert launched.result == 4242
    assert (later.owner, later.symbol) == (DRIVER, "cuLaunchKernel")


def test_a_library_that_binds_deeply_is_a_known_limit(native: Native, tmp_path: Path) -> None:
    """RTLD_DEEPBIND puts what a library is linked with before every preload: it launches past us."""
    if native.sanitize:
        pytest.skip("the sanitizers refuse RTLD_DEEPBIND")
    text = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    extern int cuLaunchKernel();
    void *directly(const char *name) { return (void *)cuLaunchKernel; }
    """
    library = build_shared(native, tmp_path / "libdeep.so", text, links=[f"-L{native.stub_dir}", "-lcuda"])
    _, plain = ask(native, [f"open {library}", "call directly -"])
    _, deep = ask(native, [f"opendeep {library}", "call directly -"])
    assert (plain.owner, deep.owner) == (OURS, DRIVER)


# --- without a driver, and many at once -----------------------------------------------------------------------------


def test_a_machine_without_a_driver_is_as_without_us(native: Native, tmp_path: Path) -> None:
    lines = ["sym default cuInit", "sym next malloc", "sym default nothing"]
    assert ask(native, lines, stub=tmp_path) == ask(native, lines, stub=tmp_path, preload=False)
    (launched,) = ask(native, ["launch default"], stub=tmp_path)
    assert launched.result == 801  # CUDA_ERROR_NOT_SUPPORTED


def test_threads_that_all_come_first(native: Native) -> None:
    text = r"""
    #include <cuda.h>
    #include <dlfcn.h>
    #include <pthread.h>
    #include <stdio.h>
    static pthread_barrier_t together;
    static void *find(void *number) {
        pthread_barrier_wait(&together);
        long which = (long)number;
        if (which % 3 == 0) {
            return dlsym(RTLD_DEFAULT, "cuLaunchKernel");
        }
        void *address = NULL;
        CUdriverProcAddressQueryResult status;
        if (which % 3 == 1) {
            (void)cuGetProcAddress("cuLaunchKernel", &address, 12000, 0, &status);
            return address;
        }
        return dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuLaunchKernel");
    }
    int main(void) {
        pthread_t threads[24];
        void *found[24];
        int num_same = 0;
        pthread_barrier_init(&together, NULL, 24);
        for (long k = 0; k < 24; k++) pthread_create(&threads[k], NULL, find, (void *)k);
        for (int k = 0; k < 24; k++) pthread_join(threads[k], &found[k]);
        for (int k = 0; k < 24; k++) num_same += found[k] == found[0] && found[k] != NULL;
        Dl_info info;
        dladdr(found[0], &info);
        printf("{\"num_same\": %d, \"owner\": \"%s\"}\n", num_same, info.dli_fname);
        return 0;
    }
    """
    for _ in range(5):
        said = native.run("#define _GNU_SOURCE\n" + text).json()
        assert said["num_same"] == 24
        assert said["owner"].endswith(OURS)


def test_looking_up_while_a_library_is_being_opened(native: Native, tmp_path: Path) -> None:
    """One thread holds the linker's lock and calls us, another is in us and wants that lock: both come through."""
    opened = build_shared(
        native,
        tmp_path / "libopened.so",
        """
        #include <unistd.h>
        extern int cuStreamSynchronize(void *), launches_now;
        __attribute__((constructor)) static void begin(void) {
            *(volatile int *)&launches_now = 1;
            for (int k = 0; k < 50; k++) { cuStreamSynchronize(0); usleep(10); }
        }
        """,
        links=["-Wl,--unresolved-symbols=ignore-all"],
    )
    text = f"""
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <pthread.h>
    #include <stdio.h>
    extern int cuStreamSynchronize(void *);
    int launches_now;
    static void *open_it(void *unused) {{ return dlopen("{opened}", RTLD_NOW); }}
    int main(void) {{
        pthread_t thread;
        pthread_create(&thread, NULL, open_it, NULL);
        while (*(volatile int *)&launches_now == 0) {{}}
        int result = cuStreamSynchronize(NULL);
        void *handle;
        pthread_join(thread, &handle);
        printf("{{\\"result\\": %d, \\"is_open\\": %d}}\\n", result, handle != NULL);
        return 0;
    }}
    """
    said = native.run(text, links=["-rdynamic", "-lcuda"], timeout_s=20).json()
    assert said["is_open"] == 1


def test_the_library_shows_only_what_it_hooks(native: Native, hooked: list[Entry]) -> None:
    shown = {name for names in symbols_of(native.library).values() for name in names}
    nvml = {name for name in shown if name.startswith("nvml")}
    assert shown - nvml == {entry.symbol for entry in hooked} | {"dlsym", "dlvsym"}
