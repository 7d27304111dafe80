/* Sends bytes to a device and reads them back, and loads a file: device [NAME [FILE]], for example vulkan:0. */
#include "dmalane.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(int32_t result, const char *what)
{
	char text[512];
	if (result == 0)
		return;
	dml_last_error(text, sizeof text);
	fprintf(stderr, "%s: %s\n", what, text);
	exit(strcmp(what, "open") ? 1 : 2);
}

/* Submits operations, and waits for all of them. */
static void run(dml_target device, const struct dml_target_op *ops, size_t count)
{
	struct dml_completion done[4];
	size_t n;
	check(dml_target_submit(device, ops, sizeof *ops, count, &n), "submit");
	for (; count > 0; count -= n) {
		check(dml_target_poll(device, done, 4, UINT64_MAX, &n), "poll");
		for (size_t i = 0; i < n; i++)
			check(done[i].result, "operation");
	}
}

int main(int argc, char **argv)
{
	enum { LEN = 1 << 20 };
	const char *name = argc > 1 ? argv[1] : "soft";
	dml_target device; dml_memory host; dml_load load; struct dml_tensor tensor;
	void *bytes; uint32_t memory; uint64_t va, reserved;
	check(dml_target_open(name, &device), "open");
	check(dml_memory_create(device, LEN, &host, &bytes), "host memory");
	check(dml_target_allocate(device, LEN, NULL, &memory), "device memory");
	memset(bytes, 0x5a, LEN / 2);
	/* Addresses for the memory: reserved, then bound. */
	check(dml_target_reserve(device, memory, 0, &va, &reserved), "reserve");
	struct dml_vm_op bind = {.flags = DML_BIND | DML_READ | DML_WRITE, .handle = memory, .range = LEN, .addr = va};
	check(dml_target_bind(device, &bind, sizeof bind, 1), "bind");
	/* The first half into the second half of the device's memory, and that back over the second half. */
	struct dml_target_op to = {.kind = DML_TO_DEVICE, .len = LEN / 2, .at = va + LEN / 2, .memory = host};
	struct dml_target_op from = to;
	from.kind = DML_TO_HOST, from.offset = LEN / 2;
	run(device, &to, 1);
	run(device, &from, 1);
	printf("%s: %d bytes %s\n", name, LEN / 2,
		memcmp(bytes, (char *)bytes + LEN / 2, LEN / 2) ? "differ" : "went there and back");
	if (argc > 2) {
		check(dml_target_load(device, argv[2], NULL, DML_LOAD_VERIFY, &load), "load");
		check(dml_load_tensor(load, 0, &tensor, NULL, 0), "tensor");
		printf("%s: %llu bytes at %#llx\n", argv[2], (unsigned long long)tensor.len, (unsigned long long)tensor.va);
		check(dml_load_destroy(load), "unload");
	}
	check(dml_memory_destroy(host), "destroy");
	return dml_target_close(device) != 0;
}
