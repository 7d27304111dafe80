/* A program in C that uses every function of dmalane.h. Prints nothing and gives 0 when all is right. */
#define _GNU_SOURCE
#include "dmalane.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static int line_of_failure;
#define CHECK(what) \
    do { \
        if (!(what) && !line_of_failure) { \
            line_of_failure = __LINE__; \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #what); \
        } \
    } while (0)

static const uint64_t K = 16384;

struct seen {
	dml_vm vm;
	int calls, hints;
	uint64_t va, len;
};

static void prefetch(void *user, uint64_t va, uint64_t len)
{
	struct seen *seen = user;
	seen->hints++;
	CHECK(va == 16 * K && len == K);
}

static void invalidate(void *user, uint64_t va, uint64_t len)
{
	struct seen *seen = user;
	struct dml_leaf leaf;
	seen->calls++;
	seen->va = va;
	seen->len = len;
	/* Ranges to be forgotten are no longer in the tables, and the VM may be looked at. */
	CHECK(dml_vm_lookup(seen->vm, va, &leaf) == -ENOENT);
}

/* The text of the last error begins with its name. */
static int says(const char *name, const char *text)
{
	char buffer[256];
	size_t len = dml_last_error(buffer, sizeof buffer);
	return len > 0 && !strncmp(buffer, name, strlen(name)) && strstr(buffer, text);
}

static void layout(void)
{
	CHECK(sizeof(struct dml_segment) == 16);
	CHECK(sizeof(struct dml_range) == 32);
	CHECK(sizeof(struct dml_vm_config) == 88);
	CHECK(sizeof(struct dml_vm_op) == 32);
	CHECK(offsetof(struct dml_vm_op, addr) == 24);
	CHECK(sizeof(struct dml_leaf) == 32);
	CHECK(sizeof(struct dml_run) == 56);
	CHECK(sizeof(struct dml_target_info) == 48 && sizeof(struct dml_target_op) == 72);
	CHECK(sizeof(struct dml_completion) == 24 && sizeof(struct dml_tensor) == 24);
	CHECK(sizeof(struct dml_model_config) == 24 && sizeof(struct dml_model_tensor) == 104);
	CHECK(sizeof(struct dml_read_config) == 56 && sizeof(struct dml_filled) == 24);
	CHECK(dml_abi_version() == DML_ABI_VERSION);
	CHECK(!strcmp(dml_error_name(-EPERM), "EPERM") && !strcmp(dml_error_name(EHWPOISON), "EHWPOISON"));
	CHECK(!strcmp(dml_error_name(-ECANCELED), "ECANCELED") && !strcmp(dml_error_name(ENOMSG), "ENOMSG"));
	CHECK(!strcmp(dml_error_name(ESTALE), "ESTALE") && !strcmp(dml_error_name(-EBFONT), "EBFONT"));
	CHECK(!*dml_error_name(0) && !*dml_error_name(INT32_MIN) && !*dml_error_name(134) && !*dml_error_name(41));
}

static void agx(void)
{
	struct seen seen = {0};
	dml_device device;
	dml_vm vm;
	uint32_t bo, other;
	struct dml_segment segments[] = {{1ull << 32, 4 * 16384}, {1ull << 33, 4 * 16384}};
	struct dml_vm_config config = {.size = sizeof config, .format = "agx-uat", .va = K, .len = 1ull << 36,
		.reserved_va = 1ull << 30, .reserved_len = K, .invalidate = invalidate, .prefetch = prefetch, .user = &seen};
	struct dml_leaf leaf;
	struct dml_run runs[8];
	size_t count;

	CHECK(!dml_device_create(&device));
	CHECK(!dml_bo_create(device, segments, 2, &bo));
	CHECK(!dml_vm_create(device, &config, &vm));
	seen.vm = vm;

	struct dml_vm_op ops[] = {
		{.flags = DML_BIND | DML_READ | DML_WRITE, .handle = bo, .range = 8 * K, .addr = 16 * K},
		{.flags = DML_REPEAT | DML_READ, .handle = bo, .offset = 5 * K, .range = 4 * K, .addr = 32 * K},
		{.flags = DML_REPEAT | DML_READ | DML_REPEAT_LOG2(15), .handle = bo, .range = 4 * K, .addr = 40 * K},
		{.flags = DML_PREFETCH, .range = K, .addr = 16 * K},
	};
	CHECK(!dml_vm_bind(vm, ops, sizeof ops[0], 4));
	CHECK(seen.calls == 0 && seen.hints == 1);
	CHECK(!dml_vm_lookup(vm, 21 * K + 5, &leaf));
	CHECK(leaf.pa == (1ull << 33) + K + 5 && leaf.left == K - 5 && leaf.leaf == K);
	CHECK(leaf.access == (DML_READ | DML_WRITE));

	/* Null ranges only once there is a null page. */
	struct dml_vm_op null = {.flags = DML_NULL, .range = 2 * K, .addr = 48 * K};
	CHECK(dml_vm_bind(vm, &null, sizeof null, 1) == -EOPNOTSUPP);
	CHECK(dml_vm_set_null_page(vm, 1ull << 34, 100) == -EINVAL);
	CHECK(!dml_vm_set_null_page(vm, 1ull << 34, K));
	CHECK(!dml_vm_bind(vm, &null, sizeof null, 1));

	CHECK(!dml_vm_runs(vm, 0, 1ull << 39, runs, 8, &count));
	CHECK(count == 5);
	CHECK(runs[0].va == 16 * K && runs[0].len == 4 * K && runs[0].pa == 1ull << 32 && runs[0].handle == bo);
	CHECK(runs[1].va == 20 * K && runs[1].offset == 4 * K && runs[1].pa == 1ull << 33 && runs[1].repeat == 0);
	CHECK(runs[2].va == 32 * K && runs[2].len == 4 * K && runs[2].repeat == K && runs[2].offset == 5 * K);
	CHECK(runs[3].repeat == 2 * K && runs[3].access == DML_READ && runs[3].leaf == K);
	CHECK(runs[4].handle == 0 && runs[4].pa == 1ull << 34);
	memset(runs, 0xff, sizeof runs);
	CHECK(!dml_vm_runs(vm, 17 * K, 2 * K, runs, 8, &count) && count == 1);
	CHECK(runs[0].va == 17 * K && runs[0].len == 2 * K && runs[0].offset == K);
	CHECK(!dml_vm_runs(vm, 0, 1ull << 39, runs, 1, &count) && count == 5);
	CHECK(runs[1].va == UINT64_MAX);
	CHECK(!dml_vm_runs(vm, 0, 1ull << 39, NULL, 0, &count) && count == 5);

	/* Replaced and unbound: the device is told. */
	struct dml_vm_op unbind = {.flags = DML_UNBIND, .range = 2 * K, .addr = 18 * K};
	CHECK(!dml_vm_bind(vm, &unbind, sizeof unbind, 1));
	CHECK(seen.calls == 1 && seen.va <= 18 * K && seen.va + seen.len >= 20 * K);
	CHECK(dml_vm_lookup(vm, 18 * K, &leaf) == -ENOENT && leaf.leaf == 0);

	/* A batch that fails leaves nothing, and says where. */
	struct dml_vm_op bad[] = {
		{.flags = DML_UNBIND, .range = 8 * K, .addr = 16 * K},
		{.flags = DML_BIND | DML_READ, .handle = bo, .offset = 8 * K, .range = K, .addr = 16 * K},
	};
	CHECK(dml_vm_bind(vm, bad, sizeof bad[0], 2) == -ERANGE && says("ERANGE", "operation 1: "));
	CHECK(!dml_vm_lookup(vm, 17 * K, &leaf) && seen.calls == 1);
	bad[1].offset = 0;
	bad[1].addr = 1ull << 30;
	CHECK(dml_vm_bind(vm, bad, sizeof bad[0], 2) == -EPERM);
	bad[1].addr = 0;
	CHECK(dml_vm_bind(vm, bad, sizeof bad[0], 2) == -ERANGE);
	bad[1].addr = 16 * K + 1;
	CHECK(dml_vm_bind(vm, bad, sizeof bad[0], 2) == -EINVAL);
	bad[1].addr = UINT64_MAX - K + 1;
	bad[1].range = 2 * K;
	CHECK(dml_vm_bind(vm, bad, sizeof bad[0], 2) == -EOVERFLOW);
	bad[1].flags = 64;
	CHECK(dml_vm_bind(vm, bad, sizeof bad[0], 2) == -EINVAL && says("EINVAL", "flags"));
	/* Longer operations of a later version: fine as long as what is new is 0. */
	struct { struct dml_vm_op op; uint64_t more; } longer[2] = {{ops[3], 0}, {ops[3], 7}};
	CHECK(!dml_vm_bind(vm, longer, sizeof longer[0], 1));
	CHECK(dml_vm_bind(vm, longer, sizeof longer[0], 2) == -E2BIG);
	CHECK(dml_vm_bind(vm, ops, sizeof ops[0] - 1, 1) == -EINVAL);
	CHECK(!dml_vm_bind(vm, NULL, 0, 0));
	CHECK(dml_vm_bind(vm, NULL, sizeof ops[0], 1) == -EFAULT);
	CHECK(dml_vm_bind(vm, ops, SIZE_MAX, 2) == -EFAULT);
	CHECK(dml_vm_bind(vm, ops, SIZE_MAX / 2 + 1, 1) == -EFAULT);

	/* Buffer objects live where they are bound; their handles do not. */
	CHECK(!dml_bo_destroy(device, bo));
	CHECK(dml_bo_destroy(device, bo) == -ENOENT);
	CHECK(!dml_bo_create(device, segments, 1, &other) && other != bo);
	CHECK(dml_vm_bind(vm, ops, sizeof ops[0], 1) == -ENOENT);
	CHECK(!dml_vm_lookup(vm, 17 * K, &leaf));
	struct dml_vm_op gone = {.flags = DML_UNBIND_BO, .handle = other};
	CHECK(!dml_vm_bind(vm, &gone, sizeof gone, 1) && seen.calls == 1);

	CHECK(!dml_device_destroy(device));
	CHECK(dml_device_destroy(device) == -ENOENT && says("ENOENT", "no device"));
	CHECK(dml_bo_create(device, segments, 1, &other) == -ENOENT && other == 0);
	CHECK(!dml_vm_lookup(vm, 17 * K, &leaf)); /* the VM is still there */
	CHECK(!dml_vm_destroy(vm));
	CHECK(dml_vm_destroy(vm) == -ENOENT);
	CHECK(dml_vm_lookup(vm, 17 * K, &leaf) == -ENOENT);
	CHECK(dml_vm_runs(vm, 0, K, runs, 8, &count) == -ENOENT && count == 0);
}

struct broken {
	dml_device device;
	int count;
};

/* Other objects of the device do not wait. */
static void count(void *user, uint64_t va, uint64_t len)
{
	struct broken *broken = user;
	struct dml_segment segment = {1ull << 40, 4 << 10};
	uint32_t bo;
	(void)va;
	CHECK(!dml_bo_create(broken->device, &segment, 1, &bo) && !dml_bo_destroy(broken->device, bo));
	broken->count += len > 0;
}

static void x86(void)
{
	dml_device device;
	dml_vm vm, second;
	uint32_t bo;
	struct dml_segment segments[] = {{1ull << 30, 4 << 20}};
	struct dml_vm_config config = {.size = sizeof config, .format = "x86-64-4level", .va = 4096, .len = 1ull << 40,
		.table_limit = 16};
	struct dml_leaf leaf;
	CHECK(!dml_device_create(&device));
	CHECK(!dml_bo_create(device, segments, 1, &bo));
	CHECK(bo == 1 && !dml_vm_create(device, &config, &vm) && !dml_vm_create(device, &config, &second) && vm != second);
	struct dml_vm_op op = {.flags = DML_BIND | DML_READ | DML_WRITE, .handle = bo, .range = 4 << 20, .addr = 1ull << 30};
	/* A huge leaf in one, small ones in the other. */
	CHECK(!dml_vm_bind(vm, &op, sizeof op, 1));
	op.addr += 4096;
	CHECK(!dml_vm_bind(second, &op, sizeof op, 1));
	CHECK(!dml_vm_lookup(vm, (1ull << 30) + (3 << 20), &leaf) && leaf.leaf == 2 << 20 && leaf.left == 1 << 20);
	CHECK(!dml_vm_lookup(second, (1ull << 30) + 4096, &leaf) && leaf.leaf == 4096 && leaf.pa == 1ull << 30);
	/* By break-before-make: the leaf while it is split, then the page. */
	dml_vm third;
	struct broken broken = {device, 0};
	config.break_before_make = 2;
	CHECK(dml_vm_create(device, &config, &third) == -EINVAL && says("EINVAL", "break_before_make"));
	config.break_before_make = 1;
	CHECK(dml_vm_create(device, &config, &third) == -EINVAL && says("EINVAL", "invalidate"));
	config.invalidate = count, config.user = &broken;
	struct dml_vm_op page = {.flags = DML_UNBIND, .range = 4096, .addr = (1ull << 30) + (1 << 20)};
	op.addr -= 4096;
	CHECK(!dml_vm_create(device, &config, &third) && !dml_vm_bind(third, &op, sizeof op, 1) && broken.count == 0);
	CHECK(!dml_vm_bind(third, &page, sizeof op, 1) && broken.count == 2);
	page.flags = DML_BIND | DML_READ | DML_PRIVILEGED | DML_MMIO, page.handle = bo;
	CHECK(!dml_vm_bind(third, &page, sizeof op, 1) && !dml_vm_lookup(third, page.addr, &leaf));
	CHECK(leaf.access == (DML_READ | DML_PRIVILEGED | DML_MMIO) && !dml_vm_destroy(third));
	/* No tables for this one. */
	op.flags = DML_REPEAT | DML_READ;
	op.range = 1ull << 32;
	CHECK(dml_vm_bind(vm, &op, sizeof op, 1) == -ENOMEM);
	CHECK(!dml_vm_destroy(vm) && !dml_vm_destroy(second) && !dml_device_destroy(device));
}

static int released;
static uint32_t released_handle;

static void release(void *user, uint32_t handle)
{
	dml_device *device = user, other;
	released++;
	released_handle = handle;
	/* No lock is held. */
	CHECK(dml_bo_destroy(*device, handle) == -ENOENT);
	CHECK(!dml_device_create(&other) && !dml_device_destroy(other));
}

/* A driver's own part, a split that heals, and a buffer whose memory is given back at the right time. */
static void drivers(void)
{
	dml_device device;
	dml_vm vm;
	uint32_t bo;
	uint64_t bound;
	struct dml_leaf leaf;
	struct dml_segment segments[] = {{1ull << 30, 4 << 20}};
	struct dml_vm_config config = {.size = sizeof config, .format = "x86-64-4level", .len = 1ull << 40,
		.reserved_va = 2ull << 30, .reserved_len = 1ull << 30};
	CHECK(!dml_device_create(&device) && !dml_bo_create(device, segments, 1, &bo));
	CHECK(!dml_bo_on_release(device, bo, release, &device));
	CHECK(dml_bo_on_release(device, bo, release, &device) == -EEXIST && says("EEXIST", "callback"));
	CHECK(dml_bo_on_release(device, bo, NULL, NULL) == -EFAULT);
	CHECK(!dml_vm_create(device, &config, &vm));
	struct dml_vm_op op = {.flags = DML_BIND | DML_READ, .handle = bo, .range = 4 << 20, .addr = 1ull << 30};
	struct dml_vm_op theirs = op, all = {.flags = DML_UNBIND_BO, .handle = bo};
	theirs.addr = config.reserved_va;
	CHECK(!dml_vm_bind(vm, &op, sizeof op, 1) && dml_vm_bind_reserved(vm, &op, sizeof op, 1) == -EPERM);
	CHECK(!dml_vm_bind_reserved(vm, &theirs, sizeof op, 1) && dml_vm_bind(vm, &theirs, sizeof op, 1) == -EPERM);
	CHECK(!dml_bo_bound_bytes(vm, bo, &bound) && bound == 8 << 20);
	CHECK(!dml_bo_bindings(device, bo, &bound) && bound == 1);
	/* The same in another VM. */
	dml_vm other;
	CHECK(!dml_vm_create(device, &config, &other) && !dml_vm_bind(other, &op, sizeof op, 1));
	CHECK(!dml_bo_bindings(device, bo, &bound) && bound == 2);
	CHECK(!dml_vm_destroy(other) && !dml_bo_bindings(device, bo, &bound) && bound == 1);
	CHECK(dml_bo_bindings(device, bo + 1, &bound) == -ENOENT && dml_bo_bindings(device, bo, NULL) == -EFAULT);
	/* A page goes and comes back. */
	struct dml_vm_op page = {.flags = DML_UNBIND, .range = 4096, .addr = op.addr + (1 << 20)};
	CHECK(!dml_vm_bind(vm, &page, sizeof op, 1));
	page = op, page.range = 4096, page.offset = 1 << 20, page.addr += 1 << 20;
	CHECK(!dml_vm_bind(vm, &page, sizeof op, 1));
	CHECK(!dml_vm_lookup(vm, page.addr, &leaf) && leaf.leaf == 4096);
	CHECK(!dml_vm_merge(vm, op.addr, op.range) && dml_vm_merge(vm, op.addr + 1, 4096) == -EINVAL);
	CHECK(!dml_vm_lookup(vm, page.addr, &leaf) && leaf.leaf == 2 << 20);
	/* Each side unbinds its own. */
	CHECK(!dml_vm_bind(vm, &all, sizeof op, 1) && !dml_bo_bound_bytes(vm, bo, &bound) && bound == 4 << 20);
	CHECK(!dml_vm_lookup(vm, theirs.addr, &leaf) && dml_vm_lookup(vm, op.addr, &leaf) == -ENOENT);
	CHECK(!dml_bo_destroy(device, bo) && !released && dml_bo_bound_bytes(vm, bo, &bound) == -ENOENT);
	struct dml_vm_op last = {.flags = DML_UNBIND, .range = 4 << 20, .addr = theirs.addr};
	CHECK(!dml_vm_bind_reserved(vm, &last, sizeof op, 1) && released == 1 && released_handle == bo);
	CHECK(!dml_vm_destroy(vm) && !dml_device_destroy(device) && released == 1);
}

static void refused(void)
{
	dml_device device;
	dml_vm vm = 7;
	uint32_t bo = 7;
	struct { struct dml_vm_config config; uint64_t more; } config = {
		{.size = sizeof config.config, .format = "agx-uat", .va = K, .len = K}, 0};
	struct dml_segment wraps[] = {{UINT64_MAX, 2}}, empty[] = {{4096, 0}};
	char text[8];
	CHECK(dml_device_create(NULL) == -EFAULT);
	CHECK(!dml_device_create(&device));
	CHECK(dml_bo_create(device, NULL, 1, &bo) == -EFAULT && bo == 0);
	CHECK(dml_bo_create(device, wraps, SIZE_MAX / 8, &bo) == -EFAULT);
	CHECK(dml_bo_create(device, wraps, 1, NULL) == -EFAULT);
	CHECK(dml_bo_create(device, wraps, 1, &bo) == -EOVERFLOW && dml_bo_create(device, empty, 1, &bo) == -EINVAL);
	CHECK(!dml_bo_create(device, NULL, 0, &bo) && bo != 0);
	CHECK(dml_vm_create(device, NULL, &vm) == -EFAULT && vm == 0);
	CHECK(dml_vm_create(device, &config.config, NULL) == -EFAULT);
	CHECK(!dml_vm_create(device, &config.config, &vm));
	config.config.size += 8;
	CHECK(!dml_vm_create(device, &config.config, &vm));
	config.more = 1;
	CHECK(dml_vm_create(device, &config.config, &vm) == -E2BIG);
	config.config.size = 8;
	CHECK(dml_vm_create(device, &config.config, &vm) == -EINVAL);
	config.config.size = 4097;
	CHECK(dml_vm_create(device, &config.config, &vm) == -E2BIG && says("E2BIG", "4097 bytes, above 4096"));
	config.config.size = UINT64_MAX;
	CHECK(dml_vm_create(device, &config.config, &vm) == -E2BIG);
	config.config.size = sizeof config.config;
	config.config.format = NULL;
	CHECK(dml_vm_create(device, &config.config, &vm) == -EFAULT);
	config.config.format = "\xff";
	CHECK(dml_vm_create(device, &config.config, &vm) == -EINVAL);
	config.config.format = "vax";
	CHECK(dml_vm_create(device, &config.config, &vm) == -EINVAL && says("EINVAL", "format \"vax\" is unknown"));
	config.config.format = "riscv-sv39-napot";
	CHECK(!dml_vm_create(device, &config.config, &vm) && !dml_vm_destroy(vm));
	config.config.format = "agx-uat";
	config.config.len = 0;
	CHECK(dml_vm_create(device, &config.config, &vm) == -EOVERFLOW);
	config.config.len = 1ull << 39;
	CHECK(dml_vm_create(device, &config.config, &vm) == -EINVAL);
	config.config.len = 4096;
	CHECK(dml_vm_create(device, &config.config, &vm) == -EINVAL && vm == 0);
	size_t len = dml_last_error(text, sizeof text);
	CHECK(len > sizeof text && strlen(text) == sizeof text - 1 && dml_last_error(NULL, 0) == len);
	CHECK(!dml_device_destroy(device));
}

struct work {
	dml_device device;
	dml_vm vm;
	uint64_t va;
	int failures;
};

static void *binds(void *argument)
{
	struct work *work = argument;
	struct dml_segment segment = {1ull << 32, 64 * 16384};
	for (int i = 0; i < 200; i++) {
		uint32_t bo = 0;
		struct dml_leaf leaf = {0};
		work->failures += !!dml_bo_create(work->device, &segment, 1, &bo);
		struct dml_vm_op bind = {.flags = DML_BIND | DML_READ, .handle = bo, .range = 64 * K, .addr = work->va};
		struct dml_vm_op unbind = {.flags = DML_UNBIND_BO, .handle = bo};
		work->failures += !!dml_vm_bind(work->vm, &bind, sizeof bind, 1);
		work->failures += !!dml_vm_lookup(work->vm, work->va + 3 * K, &leaf) || leaf.pa != segment.pa + 3 * K;
		work->failures += dml_vm_bind(work->vm, &bind, 1, 1) != -EINVAL || !says("EINVAL", "stride of 1 ");
		work->failures += !!dml_vm_bind(work->vm, &unbind, sizeof unbind, 1);
		work->failures += !!dml_bo_destroy(work->device, bo);
	}
	return NULL;
}

static void threads(void)
{
	struct work work[4];
	pthread_t thread[4];
	dml_device device;
	dml_vm vm;
	size_t count = 1;
	struct dml_vm_config config = {.size = sizeof config, .format = "agx-uat", .va = K, .len = 1ull << 36};
	CHECK(!dml_device_create(&device) && !dml_vm_create(device, &config, &vm));
	for (int i = 0; i < 4; i++) {
		work[i] = (struct work){device, vm, (i + 1) * 100 * K, 0};
		CHECK(!pthread_create(&thread[i], NULL, binds, &work[i]));
	}
	for (int i = 0; i < 4; i++) {
		CHECK(!pthread_join(thread[i], NULL) && work[i].failures == 0);
	}
	CHECK(!dml_vm_runs(vm, 0, 1ull << 39, NULL, 0, &count) && count == 0);
	CHECK(!dml_vm_destroy(vm) && !dml_device_destroy(device));
}

static void reads(void)
{
	enum { LEN = 3000000 };
	static unsigned char bytes[LEN];
	FILE *file = tmpfile();
	dml_buffer buffer = 7;
	struct dml_filled filled;
	struct dml_read_config config = {.size = sizeof config, .flags = DML_READ_SHAREABLE | DML_READ_CHECKSUM};
	struct stat stat;
	int fd, pipes[2];

	for (size_t i = 0; i < LEN; i++) bytes[i] = (unsigned char)(i ^ i >> 8);
	CHECK(file && fwrite(bytes, 1, LEN, file) == LEN && !fflush(file));
	CHECK(!dml_alloc_and_read(fileno(file), &config, &buffer, &filled));
	CHECK(filled.len == LEN && !memcmp(filled.data, bytes, LEN) && filled.checksum != 0);
	CHECK(!dml_buffer_export(buffer, &fd) && !fstat(fd, &stat) && stat.st_size >= LEN && !close(fd));
	CHECK(!dml_buffer_destroy(buffer) && dml_buffer_destroy(buffer) == -ENOENT);
	CHECK(dml_buffer_export(buffer, &fd) == -ENOENT && fd == -1);

	config = (struct dml_read_config){.size = sizeof config, .offset = 1000, .len = 5, .flags = DML_READ_BUFFERED};
	CHECK(!dml_alloc_and_read(fileno(file), &config, &buffer, &filled));
	CHECK(filled.len == 5 && !memcmp(filled.data, bytes + 1000, 5) && filled.checksum == 0);
	CHECK(dml_buffer_export(buffer, &fd) == -EOPNOTSUPP && !dml_buffer_destroy(buffer));

	config.len = LEN;
	CHECK(dml_alloc_and_read(fileno(file), &config, &buffer, &filled) == -ENODATA && buffer == 0 && !filled.data);
	CHECK(says("ENODATA", "before the end of the range at 3001000"));
	config = (struct dml_read_config){.size = sizeof config, .limit = 1000};
	CHECK(dml_alloc_and_read(fileno(file), &config, &buffer, &filled) == -ENOMEM);
	config = (struct dml_read_config){.size = sizeof config, .flags = DML_READ_DIRECT | DML_READ_BUFFERED};
	CHECK(dml_alloc_and_read(fileno(file), &config, &buffer, &filled) == -EINVAL);
	config.flags = 1u << 31;
	CHECK(dml_alloc_and_read(fileno(file), &config, &buffer, &filled) == -EINVAL);
	config = (struct dml_read_config){.size = sizeof config, .offset = 2, .len = UINT64_MAX};
	CHECK(dml_alloc_and_read(fileno(file), &config, &buffer, &filled) == -EOVERFLOW);
	config = (struct dml_read_config){.size = sizeof config, .threads = 65};
	CHECK(dml_alloc_and_read(fileno(file), &config, &buffer, &filled) == -ERANGE);
	config.size = 8;
	CHECK(dml_alloc_and_read(fileno(file), &config, &buffer, &filled) == -EINVAL);
	CHECK(dml_alloc_and_read(fileno(file), NULL, &buffer, &filled) == -EFAULT);
	config = (struct dml_read_config){.size = sizeof config, .timeout_ms = 20};
	CHECK(dml_alloc_and_read(fileno(file), &config, NULL, &filled) == -EFAULT);
	CHECK(dml_alloc_and_read(fileno(file), &config, &buffer, NULL) == -EFAULT);
	CHECK(dml_alloc_and_read(-1, &config, &buffer, &filled) == -EINVAL);
	CHECK(dml_alloc_and_read(1000000, &config, &buffer, &filled) == -EBADF);
	CHECK(!pipe(pipes) && dml_alloc_and_read(pipes[0], &config, &buffer, &filled) == -ESPIPE);
	CHECK(says("", "it is a FIFO, not a file") && !close(pipes[0]) && !close(pipes[1]));
	fclose(file);
}

/* Ranges of several files into several buffers, and a dma-buf of one. */
static void ranges(void)
{
	enum { LEN = 3000000 };
	static unsigned char bytes[2][LEN];
	FILE *files[2] = {tmpfile(), tmpfile()};
	struct dml_read_config config = {.size = sizeof config, .flags = DML_READ_SHAREABLE | DML_READ_CHECKSUM};
	struct dml_filled filled[2];
	dml_buffer buffers[2] = {7, 7};
	struct stat stat;
	int fds[2], pipes[2], fd = 7;

	for (int f = 0; f < 2; f++) {
		for (size_t i = 0; i < LEN; i++) bytes[f][i] = (unsigned char)((i ^ i >> 8) + f);
		CHECK(files[f] && fwrite(bytes[f], 1, LEN, files[f]) == LEN && !fflush(files[f]));
		fds[f] = fileno(files[f]);
	}
	struct dml_range all[] = {
		{.fd = fds[0], .offset = 4096, .len = 100000, .buffer = 1},
		{.fd = fds[1], .offset = 1000, .buffer = 0, .to = 5},
		{.fd = fds[0], .offset = LEN - 1, .len = 1, .buffer = 1, .to = 100001},
	};
	CHECK(!dml_alloc_and_read_ranges(all, 3, &config, 2, buffers, filled));
	CHECK(filled[0].len == LEN - 995 && filled[0].checksum && filled[1].checksum);
	CHECK(!memcmp(filled[0].data, "\0\0\0\0\0", 5));
	CHECK(!memcmp((char *)filled[0].data + 5, bytes[1] + 1000, LEN - 1000));
	unsigned char *second = filled[1].data;
	CHECK(filled[1].len == 100002 && !memcmp(second, bytes[0] + 4096, 100000));
	CHECK(second[100000] == 0 && second[100001] == bytes[0][LEN - 1]);

	int32_t exported = dml_buffer_export_dma_buf(buffers[0], &fd);
	if (exported) {
		CHECK(exported == -ENOENT && fd == -1 && says("ENOENT", "/dev/udmabuf"));
		fprintf(stderr, "SKIPPED: the kernel has no /dev/udmabuf\n");
	} else {
		/* A dma-buf ends where its memory does, and has the bytes. */
		off_t end = lseek(fd, 0, SEEK_END);
		CHECK(end >= LEN - 995 && end % 4096 == 0);
		unsigned char *mapped = mmap(NULL, (size_t)end, PROT_READ, MAP_SHARED, fd, 0);
		CHECK(mapped != MAP_FAILED && !memcmp(mapped + 5, bytes[1] + 1000, LEN - 1000));
		CHECK(!munmap(mapped, (size_t)end) && !close(fd));
	}
	CHECK(!dml_buffer_export(buffers[1], &fd) && !fstat(fd, &stat) && stat.st_size >= 100002 && !close(fd));
	CHECK(!dml_buffer_destroy(buffers[0]) && !dml_buffer_destroy(buffers[1]));
	CHECK(dml_buffer_export_dma_buf(buffers[0], &fd) == -ENOENT && fd == -1);

	/* A buffer ends where the last of its bytes does, whatever the order of its ranges. */
	struct dml_range backwards[] = {all[2], all[1], all[0]};
	CHECK(!dml_alloc_and_read_ranges(backwards, 3, &config, 2, buffers, filled) && filled[1].len == 100002);
	CHECK(!memcmp(filled[1].data, bytes[0] + 4096, 100000));
	CHECK(!dml_buffer_destroy(buffers[0]) && !dml_buffer_destroy(buffers[1]));

	/* Nothing is left behind. */
	all[2].to = 99999;
	CHECK(dml_alloc_and_read_ranges(all, 3, &config, 2, buffers, filled) == -EINVAL && !buffers[0] && !filled[1].data);
	CHECK(says("EINVAL", "overlap"));
	all[2].to = UINT64_MAX;
	CHECK(dml_alloc_and_read_ranges(all, 3, &config, 2, buffers, filled) == -EOVERFLOW);
	all[2].to = 100001, all[2].buffer = 2;
	CHECK(dml_alloc_and_read_ranges(all, 3, &config, 2, buffers, filled) == -EINVAL);
	CHECK(dml_alloc_and_read_ranges(all, 3, &config, 4, buffers, NULL) == -EFAULT);
	CHECK(dml_alloc_and_read_ranges(all, 1, &config, 2, buffers, filled) == -EINVAL);
	CHECK(says("EINVAL", "no range is of buffer 0"));
	all[1].len = LEN;
	CHECK(dml_alloc_and_read_ranges(all, 2, &config, 2, buffers, filled) == -ENODATA);
	all[1].fd = -1;
	CHECK(dml_alloc_and_read_ranges(all, 2, &config, 2, buffers, filled) == -EINVAL);
	all[1].fd = 1000000;
	CHECK(dml_alloc_and_read_ranges(all, 2, &config, 2, buffers, filled) == -EBADF);
	CHECK(!pipe(pipes));
	all[0] = (struct dml_range){.fd = pipes[0], .len = 5};
	CHECK(dml_alloc_and_read_ranges(all, 1, &config, 1, buffers, filled) == -ESPIPE);
	CHECK(!close(pipes[0]) && !close(pipes[1]));
	config.len = 1;
	CHECK(dml_alloc_and_read_ranges(all, 1, &config, 1, buffers, filled) == -EINVAL);
	config.len = 0;
	CHECK(dml_alloc_and_read_ranges(NULL, 1, &config, 1, buffers, filled) == -EFAULT);
	CHECK(!dml_alloc_and_read_ranges(NULL, 0, &config, 0, NULL, NULL));
	fclose(files[0]), fclose(files[1]);
}

/* Submits one operation and waits for it. */
static int32_t one(dml_target target, struct dml_target_op op)
{
	struct dml_completion done = {0};
	size_t count = 7;
	int32_t result = dml_target_submit(target, &op, sizeof op, 1, &count);
	if (result) {
		CHECK(count == 0);
		return result;
	}
	CHECK(count == 1 && !dml_target_poll(target, &done, 1, UINT64_MAX, &count) && count == 1);
	CHECK(done.user == op.user && (done.result || done.bytes == op.len * (op.rows ? op.rows : 1)));
	return done.result;
}

/* A device: host memory, device memory at addresses, copies in flight, loads. */
static void target(const char *name)
{
	enum { LEN = 1 << 20 };
	dml_target target = 7;
	dml_memory memory = 7, file_memory;
	dml_buffer buffer;
	dml_load load = 7;
	void *data, *file_data;
	uint32_t handle, other;
	uint64_t va, second, reserved, page;
	struct dml_target_info info;
	struct dml_completion done[4];
	struct dml_tensor tensor;
	char text[8], path[] = "/tmp/dmalane-capi-XXXXXX";
	size_t count;

	CHECK(!dml_target_open(name, &target) && !dml_target_info(target, &info));
	page = info.page;
	CHECK(page >= 4096 && info.free > 4 * LEN && info.capacity > 0 && info.max_len >= LEN && !info.zero);
	int flat = info.flags & DML_TARGET_FLAT;
	CHECK(!flat == !strcmp(name, "soft")); /* the others have no MMU */
	CHECK(dml_memory_create(target, 0, &memory, &data) == -EINVAL && memory == 0 && !data);
	CHECK(dml_memory_create(target, LEN, NULL, &data) == -EFAULT && dml_memory_create(target, LEN, &memory, NULL));
	CHECK(!dml_memory_create(target, 2 * LEN, &memory, &data) && ((char *)data)[2 * LEN - 1] == 0);
	CHECK(dml_target_allocate(target, 0, NULL, &handle) == -EINVAL && handle == 0);
	CHECK(dml_target_allocate(target, UINT64_MAX, NULL, &handle) == -ENOMEM);
	CHECK(dml_target_allocate(target, LEN, "nvm", &handle) == -EINVAL && says("EINVAL", "no nvm memory"));
	CHECK(dml_target_allocate(target, LEN, "", &handle) == -EINVAL && says("EINVAL", "not a placement"));
	CHECK(!dml_target_allocate(target, 2 * LEN, "default", &handle) && !dml_target_allocate(target, LEN, NULL, &other));
	CHECK(dml_target_reserve(target, handle + 100, 0, &va, &reserved) == -ENOENT && va == 0 && reserved == 0);
	CHECK(!dml_target_reserve(target, handle, 0, &va, &reserved) && reserved >= 2 * LEN);
	CHECK(dml_target_free(target, handle) == -EBUSY && says("EBUSY", "reserved"));

	/* Binds: only where a range was reserved, and only what is there. */
	struct dml_vm_op op = {.flags = DML_BIND | DML_READ | DML_WRITE, .handle = handle, .range = 2 * LEN, .addr = va};
	struct dml_vm_op bad = op;
	bad.addr = va + (64ull << 30);
	CHECK(dml_target_bind(target, &bad, sizeof op, 1) == -ENOENT && says("ENOENT", "reserved"));
	bad = op, bad.handle = handle + 100;
	CHECK(dml_target_bind(target, &bad, sizeof op, 1) == -ENOENT && says("ENOENT", "operation 0: "));
	bad = op, bad.flags = DML_BIND;
	CHECK(dml_target_bind(target, &bad, sizeof op, 1) == -EINVAL);
	CHECK(dml_target_bind(target, &op, sizeof op - 1, 1) == -EINVAL && dml_target_bind(target, NULL, 32, 1) == -EFAULT);
	CHECK(!dml_target_bind(target, NULL, 0, 0) && !dml_target_bind(target, &op, sizeof op, 1));
	if (flat) {
		CHECK(!dml_target_bind(target, &(struct dml_vm_op[2]){op, op}, sizeof op, 2));
	} else {
		/* The halves change places, in one batch, at another range. */
		CHECK(!dml_target_reserve(target, handle, 2 * LEN, &second, &reserved) && second != va);
		struct dml_vm_op halves[] = {op, op};
		halves[0].range = halves[1].range = LEN;
		halves[0].addr = second, halves[0].offset = LEN, halves[1].addr = second + LEN;
		CHECK(!dml_target_bind(target, halves, sizeof op, 2));
	}

	/* Copies. */
	for (size_t i = 0; i < LEN; i++) ((unsigned char *)data)[i] = (unsigned char)(i ^ i >> 8);
	struct dml_target_op to = {.kind = DML_TO_DEVICE, .user = 11, .len = LEN, .at = va, .memory = memory};
	struct dml_target_op from = {.kind = DML_TO_HOST, .user = UINT64_MAX, .len = LEN, .at = va, .memory = memory,
		.offset = LEN};
	CHECK(!one(target, to));
	CHECK(!one(target, from) && !memcmp(data, (char *)data + LEN, LEN));
	if (!flat) {
		memset((char *)data + LEN, 0, LEN);
		from.at = second + LEN;
		CHECK(!one(target, from) && !memcmp(data, (char *)data + LEN, LEN));
		from.at = second + (1ull << 40);
		CHECK(one(target, from) == -EFAULT);
	}
	from.at = va;
	from.offset = LEN + 1;
	CHECK(one(target, from) == -ERANGE);
	from.offset = UINT64_MAX;
	CHECK(one(target, from) == -ERANGE);
	from.offset = LEN, from.memory += 1000;
	CHECK(one(target, from) == -ENOENT);
	from.memory = memory, from.len = 0;
	CHECK(one(target, from) == -EINVAL);
	from.len = LEN, from.kind = 6;
	CHECK(one(target, from) == -EINVAL && says("EINVAL", "no kind of operation is 6"));
	from.kind = DML_TO_HOST;
	/* The first fields are enough; those of a later version are refused. */
	struct { struct dml_target_op op; uint64_t later; } long_op = {from, 1};
	CHECK(dml_target_submit(target, &long_op, sizeof long_op, 1, &count) == -E2BIG && count == 0);
	enum { SHORTEST = offsetof(struct dml_target_op, value) };
	CHECK(!dml_target_submit(target, &from, SHORTEST, 1, &count) && count == 1);
	CHECK(!dml_target_poll(target, done, 4, UINT64_MAX, &count) && count == 1 && !done[0].result);
	CHECK(dml_target_submit(target, &from, SHORTEST - 1, 1, &count) == -EINVAL && count == 0);
	CHECK(dml_target_submit(target, NULL, sizeof from, 1, &count) == -EFAULT);
	CHECK(dml_target_submit(target, &from, sizeof from, 1, NULL) == -EFAULT);
	CHECK(dml_target_submit(target, &from, SIZE_MAX, 2, &count) == -EFAULT);

	/* Two at once on one host memory; the second again is refused while its bytes are the device's. */
	struct dml_target_op both[] = {to, from, from};
	both[1].user = 12;
	CHECK(dml_target_submit(target, both, sizeof to, 3, &count) == -EBUSY && count == 2);
	CHECK(dml_memory_destroy(memory) == -EBUSY && dml_target_close(target) == -EBUSY);
	CHECK(dml_target_release(target, va) == -EBUSY && dml_target_load(target, path, NULL, 0, &load) == -EBUSY);
	CHECK(dml_target_poll(target, NULL, 4, 0, &count) == -EFAULT);
	CHECK(!dml_target_poll(target, done, 0, UINT64_MAX, &count) && count == 0);
	uint64_t seen = 0;
	for (int n = 0; n < 2; n += (int)count) {
		CHECK(!dml_target_poll(target, done, 1, 10000, &count) && count == 1 && !done[0].result);
		seen += done[0].user;
		if (line_of_failure) return;
	}
	CHECK(seen == 23 && !dml_target_poll(target, done, 4, UINT64_MAX, &count) && count == 0);

	/* Stopped: what was submitted comes back, with or without its bytes, and no more is taken until a restart. */
	CHECK(dml_target_restart(target) == -EINVAL && dml_target_stop(target + 1000) == -ENOENT);
	CHECK(!dml_target_submit(target, both, sizeof to, 2, &count) && count == 2 && !dml_target_stop(target));
	CHECK(dml_target_restart(target) == -EBUSY);
	for (int n = 0; n < 2; n += (int)count) {
		CHECK(!dml_target_poll(target, done, 1, 10000, &count) && count == 1);
		CHECK(!done[0].result || done[0].result == -ECANCELED);
		if (line_of_failure) return;
	}
	CHECK(dml_target_submit(target, &to, sizeof to, 1, &count) == -ECANCELED && count == 0);
	CHECK(!dml_target_restart(target) && !one(target, to));

	/* A filled buffer goes in as it is. */
	int fd = mkstemp(path);
	CHECK(fd >= 0 && write(fd, data, LEN) == LEN);
	struct dml_read_config config = {.size = sizeof config};
	struct dml_filled filled;
	CHECK(!dml_alloc_and_read(fd, &config, &buffer, &filled));
	if (!strncmp(name, "slash", 5) || !strncmp(name, "vrtd", 4)) {
		/* Its driver takes no memory but its own, and the buffer stays what it was. */
		CHECK(dml_memory_register(target, buffer, &file_memory, &file_data) == -EIO && !file_memory);
		CHECK(says("EIO", "only buffers that its driver allocates") && !dml_buffer_destroy(buffer));
	} else {
		CHECK(!dml_memory_register(target, buffer, &file_memory, &file_data) && file_data == filled.data);
		CHECK(dml_buffer_destroy(buffer) == -ENOENT);
		CHECK(dml_memory_register(target, buffer, &buffer, &file_data) == -ENOENT);
		memset(data, 0, 2 * LEN);
		to.memory = file_memory;
		CHECK(!one(target, to) && !one(target, from) && !memcmp(filled.data, (char *)data + LEN, LEN));
		CHECK(!dml_memory_destroy(file_memory) && dml_memory_destroy(file_memory) == -ENOENT);
	}

	/* A file: one tensor, which can be read where it is bound. */
	CHECK(dml_target_load(target, "/nonexistent", NULL, 0, &load) == -ENOENT && load == 0);
	CHECK(dml_target_load(target, path, NULL, 2, &load) == -EINVAL);
	CHECK(dml_target_load(target, path, "nvm", 0, &load) == -EINVAL);
	CHECK(dml_target_load(target, path, NULL, DML_LOAD_ALIGN(22), &load) == -EINVAL && says("EINVAL", "aligned"));
	CHECK(!dml_target_load(target, path, NULL, DML_LOAD_ALIGN(21), &load));
	CHECK(!dml_load_tensor(load, 0, &tensor, NULL, 0) && tensor.va % (1 << 21) == 0 && !dml_load_destroy(load));
	CHECK(!dml_target_load(target, path, NULL, DML_LOAD_VERIFY, &load));
	CHECK(!dml_load_tensor(load, 0, &tensor, text, sizeof text) && tensor.len == LEN && tensor.name_len > 8);
	CHECK(strlen(text) == sizeof text - 1 && !strncmp(text, "dmalane", 7));
	CHECK(dml_load_tensor(load, 1, &tensor, NULL, 0) == -ENOENT && tensor.va == 0);
	CHECK(!dml_load_find(load, strrchr(path, '/') + 1, &tensor) && tensor.va != 0);
	CHECK(dml_load_find(load, "none", &tensor) == -ENOENT && says("ENOENT", "no tensor is called"));
	CHECK(!dml_load_find(load, strrchr(path, '/') + 1, &tensor));
	from.at = tensor.va, from.offset = 0;
	CHECK(!one(target, from) && !memcmp(data, (char *)data + LEN, LEN));
	CHECK(dml_target_release(target, tensor.va) == -ENOENT);
	/* It stays until what may read it has been polled. */
	CHECK(!dml_target_submit(target, &from, sizeof from, 1, &count) && dml_load_destroy(load) == -EBUSY);
	CHECK(!dml_target_poll(target, done, 4, UINT64_MAX, &count) && count == 1 && !done[0].result);
	CHECK(!dml_load_destroy(load) && dml_load_destroy(load) == -ENOENT);
	CHECK(!close(fd) && !unlink(path));

	if (!flat) CHECK(!dml_target_release(target, second));
	CHECK(!dml_target_release(target, va) && dml_target_release(target, va) == -ENOENT);
	CHECK(!dml_target_free(target, handle) && dml_target_free(target, handle) == -ENOENT);
	CHECK(!dml_target_free(target, other));
	uint64_t before = info.free;
	CHECK(!dml_target_info(target, &info) && info.free == before);
	CHECK(!dml_target_close(target) && dml_target_close(target) == -ENOENT);
	CHECK(dml_target_info(target, &info) == -ENOENT && info.page == 0);
	CHECK(!dml_memory_destroy(memory));
	CHECK(dml_target_open("floppy", &target) == -EINVAL && target == 0 && says("EINVAL", "floppy"));
	char own[] = "file:/tmp/dmalane-capi-XXXXXX";
	CHECK((fd = mkstemp(own + 5)) >= 0 && !ftruncate(fd, 1 << 20) && !dml_target_open(own, &target));
	CHECK(dml_target_load(target, own + 5, NULL, 0, &load) == -EINVAL && says("EINVAL", "the memory of the device"));
	CHECK(!dml_target_close(target) && !close(fd) && !unlink(own + 5));
	CHECK(dml_target_open("file:/none", &target) == -ENOENT && says("ENOENT", "/none"));
	CHECK(dml_target_open("vfio:0000:ff:1f.7", &target) == -ENODEV && dml_target_open(NULL, &target) == -EFAULT);
}

/* Writes a safetensors file of two matrices of bytes: "a" is 4 by 8, "b" 2 by 2. */
static void matrices(int fd)
{
	char header[512], data[36];
	int n = snprintf(header + 8, sizeof header - 8,
		"{\"a\":{\"dtype\":\"U8\",\"shape\":[4,8],\"data_offsets\":[0,32]},"
		"\"b\":{\"dtype\":\"U8\",\"shape\":[2,2],\"data_offsets\":[32,36]}}");
	uint64_t len = (uint64_t)n;
	memcpy(header, &len, 8);
	for (int i = 0; i < 36; i++) data[i] = (char)i;
	CHECK(write(fd, header, 8 + (size_t)n) == 8 + n && write(fd, data, sizeof data) == sizeof data);
}

static void models(void)
{
	char path[] = "/tmp/dmalane-capi-XXXXXX", file[64], text[2];
	const char *paths[] = {file, file};
	struct dml_model_config config = {.size = sizeof config, .memory_limit = 8192};
	struct dml_model_tensor tensor;
	struct dml_filled filled;
	struct dml_slice slices[] = {{1, 3}, {2, 4}};
	dml_model model = 7;
	dml_host_tensor first, second;
	dml_stream stream;
	dml_target target;
	dml_load load;

	CHECK(mkdtemp(path) != NULL);
	snprintf(file, sizeof file, "%s/m.safetensors", path);
	int fd = open(file, O_CREAT | O_RDWR, 0600);
	matrices(fd);
	CHECK(dml_model_open(paths, 1, NULL, &model) == -EFAULT && model == 0);
	CHECK(dml_model_open(NULL, 1, &config, &model) == -EFAULT && dml_model_open(paths, 2, &config, &model) == -EINVAL);
	config.flags = 1u << 9;
	CHECK(dml_model_open(paths, 1, &config, &model) == -EINVAL);
	config.flags = DML_READ_BUFFERED;
	/* A path that could be the name of a model, too. */
	CHECK(dml_model_open((const char *[]){"nowhere/m"}, 1, &config, &model) == -ENOENT && model == 0);
	CHECK(!dml_model_open(paths, 1, &config, &model));
	CHECK(!dml_model_tensor(model, 0, &tensor, text, sizeof text) && tensor.len == 32 && !strcmp(text, "a"));
	CHECK(tensor.dims == 2 && tensor.shape[0] == 4 && tensor.shape[1] == 8 && !strcmp(tensor.dtype, "U8"));
	CHECK(dml_model_tensor(model, 2, &tensor, NULL, 0) == -ENOENT && tensor.len == 0);

	/* Within the limit of two pages. */
	CHECK(!dml_model_read(model, "a", &first, &filled) && filled.len == 32 && ((char *)filled.data)[31] == 31);
	CHECK(!dml_model_read(model, "b", &second, &filled) && filled.len == 4 && ((char *)filled.data)[0] == 32);
	dml_host_tensor third = 7;
	CHECK(dml_model_read(model, "a", &third, &filled) == -ENOMEM && third == 0 && filled.data == NULL);
	CHECK(dml_model_read(model, "c", &third, &filled) == -ENOENT && says("ENOENT", "no tensor is called"));
	CHECK(!dml_host_tensor_destroy(first) && dml_host_tensor_destroy(first) == -ENOENT);
	CHECK(!dml_model_slice(model, "a", slices, 2, &first, &filled) && filled.len == 4);
	CHECK(!memcmp(filled.data, "\x0a\x0b\x12\x13", 4) && !dml_host_tensor_destroy(first));
	CHECK(dml_model_slice(model, "a", slices, 1, &first, &filled) == -EINVAL);
	CHECK(!dml_host_tensor_destroy(second));

	/* One after the other, also when the model is gone. */
	CHECK(!dml_model_stream(model, &stream) && !dml_stream_next(stream, &first, &filled, text, sizeof text));
	CHECK(!strcmp(text, "a") && ((char *)filled.data)[8] == 8);
	CHECK(!dml_target_open("ram:1MiB", &target) && !dml_target_load_model(target, model, NULL, DML_LOAD_VERIFY, &load));
	CHECK(!dml_load_destroy(load) && !dml_target_close(target));
	CHECK(!dml_model_destroy(model) && dml_model_destroy(model) == -ENOENT);
	CHECK(!dml_host_tensor_destroy(first) && !dml_stream_next(stream, &second, &filled, text, sizeof text));
	CHECK(!strcmp(text, "b") && filled.len == 4 && ((char *)filled.data)[3] == 35);
	CHECK(dml_stream_next(stream, &first, &filled, NULL, 0) == -ENOENT && says("ENOENT", "no tensor is left"));
	CHECK(!dml_stream_destroy(stream) && dml_stream_destroy(stream) == -ENOENT && !dml_host_tensor_destroy(second));
	CHECK(!close(fd) && !unlink(file) && !rmdir(path));
}

/* Submits operations, and waits until all have ended well. */
static void all(dml_target target, const struct dml_target_op *ops, size_t count, size_t completions)
{
	struct dml_completion done;
	size_t n;
	CHECK(!dml_target_submit(target, ops, sizeof *ops, count, &n) && n == count);
	for (; completions > 0 && !line_of_failure; completions--)
		CHECK(!dml_target_poll(target, &done, 1, 10000, &n) && n == 1 && !done.result);
	CHECK(!dml_target_poll(target, &done, 1, 0, &n) && n == 0);
}

/* A child of fork() is refused in no time, and what it does to its copies changes nothing for the parent. */
static void in_a_child(dml_target target, dml_memory memory, const struct dml_target_op *op)
{
	struct dml_target_info info;
	struct dml_completion done;
	size_t n;
	/* In flight, or done and not yet polled. */
	CHECK(!dml_target_submit(target, op, sizeof *op, 1, &n) && n == 1);
	pid_t child = fork();
	if (!child) {
		dml_memory more;
		void *data;
		alarm(20);
		CHECK(dml_target_info(target, &info) == -ENODEV && says("ENODEV", "is a fork"));
		CHECK(dml_target_submit(target, op, sizeof *op, 1, &n) == -ENODEV && n == 0);
		CHECK(dml_target_poll(target, &done, 1, UINT64_MAX, &n) == -ENODEV && n == 0);
		CHECK(dml_target_stop(target) == -ENODEV && dml_target_restart(target) == -ENODEV);
		CHECK(dml_memory_create(target, 4096, &more, &data) == -ENODEV);
		CHECK(dml_target_close(target) == -ENODEV && dml_memory_destroy(memory) == -EBUSY);
		_exit(line_of_failure ? 1 : 0);
	}
	int status = -1;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(!dml_target_poll(target, &done, 1, 10000, &n) && n == 1 && !done.result);
	/* Without anything in flight the memory goes in the child, and stays in the parent. */
	child = fork();
	if (!child) {
		alarm(20);
		CHECK(!dml_memory_destroy(memory));
		_exit(line_of_failure ? 1 : 0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(!one(target, *op));
}

/* Operations besides plain copies, compared with the same on an array; and what is refused. */
static void operations(const char *name)
{
	enum { LEN = 64 << 10, ABLE = DML_TARGET_WITHIN | DML_TARGET_FILL | DML_TARGET_COMPARE | DML_TARGET_ROWS |
		DML_TARGET_GATHER | DML_TARGET_CANCEL };
	static unsigned char model[LEN];
	dml_target target;
	dml_memory memory;
	void *data;
	uint32_t handle;
	uint64_t va, reserved;
	struct dml_target_info info;
	struct dml_completion done[4];
	size_t n;

	CHECK(!dml_target_open(name, &target) && !dml_target_info(target, &info));
	CHECK(!dml_memory_create(target, 2 * LEN, &memory, &data) && !dml_target_allocate(target, LEN, NULL, &handle));
	CHECK(!dml_target_reserve(target, handle, 0, &va, &reserved));
	struct dml_vm_op bind = {.flags = DML_BIND | DML_READ | DML_WRITE, .handle = handle, .range = LEN, .addr = va};
	CHECK(!dml_target_bind(target, &bind, sizeof bind, 1));
	unsigned char *out = data, *back = out + LEN;
	for (size_t i = 0; i < LEN; i++) out[i] = (unsigned char)(i * 7 ^ i >> 8);

	/* Each kind is one that the device has, or is refused. */
	struct dml_target_op fill = {.kind = DML_FILL, .user = 1, .len = LEN, .at = va, .value = 0x0807060504030201};
	struct dml_target_op rows = {.kind = DML_TO_DEVICE, .rows = 16, .user = 2, .len = 100, .at = va + 5,
		.memory = memory, .memory_pitch = 128, .pitch = 1000};
	struct dml_target_op within = {.kind = DML_WITHIN, .user = 3, .len = LEN / 2, .at = va + LEN / 2, .value = va};
	struct dml_target_op compare = {.kind = DML_COMPARE, .user = 4, .len = LEN, .at = va, .memory = memory,
		.offset = LEN};
	struct dml_target_op fence = {.kind = DML_FENCE, .user = 5};
	struct dml_target_op from = {.kind = DML_TO_HOST, .user = 6, .len = LEN, .at = va, .memory = memory, .offset = LEN};
	struct dml_target_op list[] = {
		{.kind = DML_TO_DEVICE | DML_MORE, .len = 10, .at = va + 1, .memory = memory, .offset = 30},
		{.kind = DML_TO_DEVICE | DML_MORE, .len = 3000, .at = va + 4096, .memory = memory, .offset = 8000},
		{.kind = DML_TO_DEVICE, .user = 7, .len = 1, .at = va, .memory = memory},
	};
	if ((info.flags & ABLE) != ABLE) {
		CHECK(strcmp(name, "soft"));
		uint32_t flags = info.flags;
		if (!(flags & DML_TARGET_FILL)) CHECK(one(target, fill) == -EOPNOTSUPP);
		if (!(flags & DML_TARGET_ROWS)) CHECK(one(target, rows) == -EOPNOTSUPP);
		if (!(flags & DML_TARGET_WITHIN)) CHECK(one(target, within) == -EOPNOTSUPP);
		if (!(flags & DML_TARGET_COMPARE)) CHECK(one(target, compare) == -EOPNOTSUPP);
		if (!(flags & DML_TARGET_GATHER))
			CHECK(dml_target_submit(target, list, sizeof *list, 3, &n) == -EOPNOTSUPP && n == 0);
		CHECK(!one(target, fence) && !one(target, from)); /* and no slice was kept */
		in_a_child(target, memory, &from);
		goto close;
	}
	all(target, (struct dml_target_op[]){fill, fence, rows, fence, from}, 5, 5);
	for (size_t i = 0; i < LEN; i++) model[i] = (unsigned char)(i % 8 + 1);
	for (size_t i = 0; i < 16; i++) memcpy(model + 5 + i * 1000, out + i * 128, 100);
	CHECK(!memcmp(model, back, LEN));
	/* A list ends once. */
	CHECK(!dml_target_submit(target, list, sizeof *list, 3, &n) && n == 3);
	/* Any number of operations read the same bytes, or parts of them, and none writes what another reads. */
	CHECK(!dml_target_submit(target, list, sizeof *list, 3, &n) && n == 3);
	struct dml_target_op over = from, part = list[1];
	over.offset = 10999, over.len = 1, part.kind = DML_TO_DEVICE, part.offset += 1000, part.len = 1, part.at += 1000;
	CHECK(one(target, over) == -EBUSY && dml_memory_destroy(memory) == -EBUSY);
	CHECK(!dml_target_submit(target, &part, sizeof part, 1, &n) && n == 1);
	for (int i = 0; i < 3; i++) {
		CHECK(!dml_target_poll(target, done, 1, 10000, &n) && n == 1 && !done[0].result);
		CHECK(done[0].user == 0 ? done[0].bytes == 1 : done[0].user == 7 && done[0].bytes == 3011);
	}
	struct dml_target_op same[] = {list[1], list[1], fence, part};
	same[1].kind = DML_TO_DEVICE, same[1].at += LEN / 2;
	all(target, same, 4, 3);
	CHECK(!one(target, over)); /* all that was read is free again */
	out[10999] = (unsigned char)(10999 * 7 ^ 10999 >> 8);
	memcpy(model + 4096 + LEN / 2, out + 8000, 3000);
	memcpy(model + 1, out + 30, 10), memcpy(model + 4096, out + 8000, 3000), model[0] = out[0];
	all(target, (struct dml_target_op[]){within, fence, from}, 3, 3);
	memcpy(model + LEN / 2, model, LEN / 2);
	CHECK(!memcmp(model, back, LEN) && !one(target, compare));
	back[LEN - 1] ^= 1;
	CHECK(one(target, compare) == -EBADMSG);
	/* Rows on both sides of the device, and of a pattern. */
	within.len = 10, within.rows = 3, within.memory_pitch = 20, within.pitch = 30;
	fill.len = 3, fill.rows = 2, fill.pitch = 5, fill.at = va + 9000;
	all(target, (struct dml_target_op[]){within, fill, fence, from}, 4, 4);
	for (size_t i = 0; i < 3; i++) memcpy(model + LEN / 2 + i * 30, model + i * 20, 10);
	for (size_t i = 0; i < 2; i++) memcpy(model + 9000 + i * 5, "\1\2\3", 3);
	CHECK(!memcmp(model, back, LEN));

	/* Behind a fence nothing begins before a poll, so it can be taken back. */
	fill.len = LEN, fill.rows = 0, fill.pitch = 0, fill.at = va;
	struct dml_target_op late[] = {fill, fence, fill};
	late[0].user = 8, late[0].value = 0, late[2].user = 9;
	CHECK(dml_target_cancel(target, 9) == -ENOENT);
	CHECK(!dml_target_submit(target, late, sizeof *late, 3, &n) && n == 3);
	CHECK(!dml_target_cancel(target, 9) && dml_target_cancel(target, 9) == -ENOENT);
	for (int i = 0, cancelled = 0; i < 3; i++) {
		CHECK(!dml_target_poll(target, done, 1, 10000, &n) && n == 1);
		CHECK(done[0].result == (done[0].user == 9 ? -ECANCELED : 0));
		cancelled += done[0].user == 9;
		CHECK(i < 2 || cancelled == 1);
	}
	CHECK(!one(target, from) && back[0] == 0 && !memcmp(back, back + 1, LEN - 1));
	/* One that runs ends as it is, or early. */
	CHECK(!dml_target_submit(target, &fill, sizeof fill, 1, &n) && n == 1);
	int32_t asked = dml_target_cancel(target, fill.user);
	CHECK(asked == 0 || asked == -EALREADY);
	CHECK(!dml_target_poll(target, done, 4, 10000, &n) && n == 1);
	CHECK(!done[0].result || (!asked && done[0].result == -ECANCELED));
	CHECK(dml_target_cancel(target + 1000, 1) == -ENOENT);

	/* Invalid requests are refused, and keep no slice. */
	struct dml_target_op bad = rows;
	bad.memory_pitch = UINT64_MAX;
	CHECK(one(target, bad) == -EOVERFLOW);
	bad = rows, bad.rows = 0;
	CHECK(one(target, bad) == -EINVAL && says("EINVAL", "a field"));
	bad = fill, bad.memory = memory;
	CHECK(one(target, bad) == -EINVAL);
	bad = from, bad.value = 1;
	CHECK(one(target, bad) == -EINVAL);
	bad = fence, bad.len = 1;
	CHECK(one(target, bad) == -EINVAL);
	bad = fill, bad.kind |= DML_MORE;
	CHECK(one(target, bad) == -EINVAL && says("EINVAL", "a gather list of other"));
	CHECK(dml_target_submit(target, list, sizeof *list, 2, &n) == -EINVAL && says("EINVAL", "the array ends"));
	list[2].offset = 2 * LEN;
	CHECK(dml_target_submit(target, list, sizeof *list, 3, &n) == -ERANGE && n == 0);
	bad = within, bad.len = 100, bad.rows = 0, bad.memory_pitch = bad.pitch = 0, bad.at = va + 99, bad.value = va;
	CHECK(one(target, bad) == -EINVAL && says("EINVAL", "overlap"));
	bad.at = va + 100;
	CHECK(!one(target, bad));
	/* As many parts as it says, and one more. */
	CHECK(info.max_parts && info.max_parts < 1 << 16);
	struct dml_target_op *parts = calloc(info.max_parts + 1, sizeof *parts);
	for (size_t i = 0; i <= info.max_parts; i++) {
		parts[i] = (struct dml_target_op){.kind = DML_TO_DEVICE | DML_MORE, .len = 1, .at = va + 3 * i,
			.memory = memory, .offset = 2 * i};
	}
	parts[info.max_parts].kind = parts[info.max_parts - 1].kind = DML_TO_DEVICE;
	all(target, parts, info.max_parts, 1);
	parts[info.max_parts - 1].kind |= DML_MORE;
	CHECK(dml_target_submit(target, parts, sizeof *parts, info.max_parts + 1, &n) == -E2BIG && n == 0);
	CHECK(says("E2BIG", "parts"));
	free(parts);
	list[2].offset = 0, list[2].kind = DML_TO_HOST;
	CHECK(dml_target_submit(target, list, sizeof *list, 3, &n) == -EINVAL && n == 0);
	CHECK(!one(target, from));
	in_a_child(target, memory, &from);
close:
	CHECK(!dml_target_release(target, va) && !dml_target_free(target, handle));
	CHECK(!dml_target_close(target) && !dml_memory_destroy(memory));
}

/* capi [DEVICE...]: everything, or only what devices do. */
int main(int argc, char **argv)
{
	char text[4] = "abc";
	for (int i = 1; i < argc; i++) {
		target(argv[i]);
		operations(argv[i]);
	}
	if (argc > 1) return line_of_failure ? 1 : 0;
	CHECK(dml_last_error(text, sizeof text) == 0 && text[0] == 0);
	layout();
	agx();
	x86();
	drivers();
	refused();
	threads();
	reads();
	ranges();
	models();
	target("soft");
	target("ram:64MiB");
	operations("soft");
	operations("ram:64MiB");
	return line_of_failure ? 1 : 0;
}
