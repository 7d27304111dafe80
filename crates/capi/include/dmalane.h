/* dmalane for C programs: reading files into DMA-ready memory while it is being allocated; the bind manager, which is
 * buffer objects and device address spaces (VMs) that bind them page by page; and open devices, to which bytes go.
 *
 * Functions return 0 or a negative error number of <errno.h> on Linux (-EINVAL); dml_last_error() gives details. A
 * function that fails has no effect. Objects are numbers; using one that does not exist or was destroyed returns
 * -ENOENT. A required pointer that is null returns -EFAULT. The caller guarantees that other pointers refer to as much
 * memory as the call says.
 *
 * Threads: all functions may be called from any thread, also on one object at once, and on objects that another thread
 * destroys. Calls on one target, VM or stream follow each other, and may wait for one that works (a load takes as long
 * as it takes; dml_target_poll() lets others in every few milliseconds). Calls on different objects never wait for
 * each other, but for buffer objects while an array of their device is checked: a device that hangs holds up the calls
 * on it, on its memories and loads, and no others. What another call uses is destroyed when that ends; of two threads
 * that destroy one object, one gets 0 and the other -ENOENT. The text of dml_last_error() is the thread's own.
 * Callbacks run on the thread whose call causes them. Numbers are never reused.
 *
 * The page tables of a VM are allocated by this library. Link with -ldmalane_capi.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef DMALANE_H
#define DMALANE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header; dml_abi_version() gives that of the library. */
#define DML_ABI_VERSION 1

/* Buffer objects, and the VMs that bind them. */
typedef uint64_t dml_device;
/* A device address space. */
typedef uint64_t dml_vm;

/* A physically contiguous part of a buffer object; a multiple of the page size where it is to be bound. */
struct dml_segment {
	uint64_t pa;
	uint64_t len; /* not 0 */
};

/* Configuration of a VM. Zero it, set `size`, then the fields that are needed. */
struct dml_vm_config {
	uint64_t size; /* sizeof(struct dml_vm_config) */
	const char *format; /* name of the page-table format: "agx-uat", "x86-64-4level" and so on (`dmalane iopt formats`) */
	uint64_t va; /* the first address, and bytes: multiples of the page size */
	uint64_t len;
	uint64_t reserved_va; /* a range that only dml_vm_bind_reserved() binds; both 0 for none */
	uint64_t reserved_len;
	uint64_t table_limit; /* most page tables; 0 for no limit */
	/* Invalidates the device's cached translations of `len` bytes at `va`, and waits until this is done. Called by
	 * dml_vm_bind() when something was unbound or replaced; may query the VM. It must return: neither longjmp() nor a
	 * C++ exception may leave it (nor `prefetch`). Null when there is no device. */
	void (*invalidate)(void *user, uint64_t va, uint64_t len);
	/* Called for each DML_PREFETCH once its array was applied. May be null. */
	void (*prefetch)(void *user, uint64_t va, uint64_t len);
	void *user;
	/* 1: dml_vm_bind() replaces and splits mappings by break-before-make, as Arm asks for. `invalidate`, which must not
	 * be null, is called while they are not mapped, and must not use this VM then. Else 0. */
	uint64_t break_before_make;
};

/* Flags of an operation: the access of the device, */
#define DML_READ (1u << 0)
#define DML_WRITE (1u << 1)
#define DML_EXEC (1u << 2)
#define DML_PRIVILEGED (1u << 3) /* privileged accesses only */
#define DML_UNCACHED (1u << 4)   /* ordinary memory that is not cached */
#define DML_MMIO (1u << 5)       /* registers: not cached, not merged, not reordered */
/* one of these kinds, */
#define DML_BIND (0u << 8)
#define DML_UNBIND (1u << 8)
#define DML_UNBIND_BO (2u << 8)
#define DML_NULL (3u << 8)
#define DML_REPEAT (4u << 8)
#define DML_PREFETCH (5u << 8)
/* and for DML_REPEAT the logarithm of the number of bytes that repeat; without it, one page of the format. */
#define DML_REPEAT_LOG2(log2) ((uint32_t)(log2) << 16)

/* One operation, little-endian. Fields that its kind does not use are 0. */
struct dml_vm_op {
	uint32_t flags;
	uint32_t handle; /* buffer object: DML_BIND, DML_REPEAT, DML_UNBIND_BO */
	uint64_t offset; /* into it: DML_BIND, DML_REPEAT */
	uint64_t range; /* bytes: all but DML_UNBIND_BO */
	uint64_t addr; /* the first address: all but DML_UNBIND_BO */
};

/* Translation of an address. */
struct dml_leaf {
	uint64_t pa;
	uint64_t left; /* bytes from there to the end of the leaf */
	uint64_t leaf; /* size of the leaf */
	uint32_t access; /* DML_READ to DML_MMIO */
	uint32_t zero;
};

/* A contiguous, uniform range of a VM, in leaves of one size. */
struct dml_run {
	uint64_t va;
	uint64_t len;
	uint64_t offset; /* the byte of the buffer object at va; of a DML_REPEAT, the first that repeats */
	uint64_t pa; /* where the byte at va is */
	uint64_t leaf; /* size of the leaves */
	uint64_t repeat; /* bytes that repeat, or 0 */
	uint32_t handle; /* of the buffer object; 0 for a null range */
	uint32_t access; /* DML_READ to DML_MMIO */
};

uint32_t dml_abi_version(void);

/* Copies the text of this thread's last error, cut to `size` bytes including the terminating zero. Returns its full
 * length, or 0. The text begins with the name of the number: "EINVAL: ". */
size_t dml_last_error(char *text, size_t size);
/* The name of an error number, positive or negative: "EINVAL"; "" for one that Linux does not have. */
const char *dml_error_name(int32_t number);

int32_t dml_device_create(dml_device *device);
/* VMs of the device exist until they are destroyed. */
int32_t dml_device_destroy(dml_device device);

/* Handles start at 1 and are never reused. */
int32_t dml_bo_create(dml_device device, const struct dml_segment *segments, size_t count, uint32_t *handle);
/* The buffer object exists while it is bound. */
int32_t dml_bo_destroy(dml_device device, uint32_t handle);
/* Calls `release` once, when the memory of the buffer object may be used again: its handle is destroyed, and every
 * device has forgotten its last binding. It runs at the end of the call that releases the object, and may call any
 * function of this library. It must return: neither longjmp() nor a C++ exception may leave it. -EEXIST when one is set
 * already. */
int32_t dml_bo_on_release(dml_device device, uint32_t handle, void (*release)(void *user, uint32_t handle), void *user);

int32_t dml_vm_create(dml_device device, const struct dml_vm_config *config, dml_vm *vm);
int32_t dml_vm_destroy(dml_vm vm);

/* Sets the memory that DML_NULL maps from now on: `len` zero bytes at `pa`, a power-of-two number of pages, aligned
 * to its size. */
int32_t dml_vm_set_null_page(dml_vm vm, uint64_t pa, uint64_t len);

/* Applies `count` operations, all or none. They are `stride` bytes apart, at least sizeof(struct dml_vm_op); bytes
 * beyond the structure must be 0. */
int32_t dml_vm_bind(dml_vm vm, const void *operations, size_t stride, size_t count);

/* The same for the driver itself: all operations lie within the reserved part of the VM, where nothing else reaches,
 * and DML_UNBIND_BO removes the bindings there alone. */
int32_t dml_vm_bind_reserved(dml_vm vm, const void *operations, size_t stride, size_t count);

/* Makes larger leaves within `len` bytes at `va` where what is bound continues in the buffer object and in memory.
 * Calls `invalidate` for each, which must not use this VM here. */
int32_t dml_vm_merge(dml_vm vm, uint64_t va, uint64_t len);

/* Bytes of a buffer object that are bound in the VM, each counted as often as it is. */
int32_t dml_bo_bound_bytes(dml_vm vm, uint32_t handle, uint64_t *bytes);

/* In how many VMs a buffer object is bound; once more for each page size in which a VM repeats it. */
int32_t dml_bo_bindings(dml_device device, uint32_t handle, uint64_t *vms);

/* -ENOENT where nothing is bound. */
int32_t dml_vm_lookup(dml_vm vm, uint64_t va, struct dml_leaf *leaf);

/* Writes the first `capacity` runs within `len` bytes at `va`, and to `count` the number of all of them. */
int32_t dml_vm_runs(dml_vm vm, uint64_t va, uint64_t len, struct dml_run *runs, size_t capacity, size_t *count);

/* A buffer with the contents of a file. */
typedef uint64_t dml_buffer;

/* Flags of a read. */
#define DML_READ_SHAREABLE (1u << 0) /* allows dml_buffer_export() */
#define DML_READ_DIRECT (1u << 1)    /* direct I/O, or -EOPNOTSUPP */
#define DML_READ_BUFFERED (1u << 2)  /* through the page cache; with neither flag, chosen by what is cached */
#define DML_READ_CHECKSUM (1u << 3)  /* XXH3-64 */

/* Configuration of a read. Zero it, set `size`, then the fields that are needed. */
struct dml_read_config {
	uint64_t size; /* sizeof(struct dml_read_config) */
	uint32_t flags; /* DML_READ_SHAREABLE and others */
	uint32_t threads; /* at most 64; 0 to choose automatically */
	uint64_t offset; /* in the file, in bytes */
	uint64_t len; /* bytes; 0 for all to the end */
	uint64_t chunk; /* chunk size in bytes; 0 for the default */
	uint64_t limit; /* most bytes of memory, else -ENOMEM; 0 for no limit */
	uint64_t timeout_ms; /* longest time, else -ETIMEDOUT; 0 for no limit */
};

struct dml_filled {
	void *data; /* the bytes, until the buffer is destroyed */
	uint64_t len;
	uint64_t checksum; /* 0 unless asked for */
};

/* Allocates a buffer and reads the open file `fd` into it while it is being allocated. The flags and the position of
 * the file stay as they are. Returns -ENODATA when the file ends early, -ESTALE when its size changed meanwhile,
 * -ESPIPE for a pipe or a socket, -ENOMEM, or the kernel's error. After an error nothing is in flight or allocated. */
int32_t dml_alloc_and_read(int fd, const struct dml_read_config *config, dml_buffer *buffer, struct dml_filled *filled);

/* A range of a file, and its place in a buffer. */
struct dml_range {
	uint64_t offset; /* in the file, in bytes */
	uint64_t len; /* bytes; 0 for all to the end */
	uint64_t to; /* offset in the buffer */
	int32_t fd; /* of an open file */
	uint32_t buffer; /* which of the buffers, from 0 on */
};

/* Allocates `buffer_count` buffers and reads `count` ranges of open files into them, all at once. A buffer ends with
 * the last of its ranges; bytes that no range names are 0. `buffers` and `filled` have room for as many; `offset` and
 * `len` of the configuration are 0, `limit` is of all buffers together. -EINVAL where ranges overlap in a buffer or a
 * buffer has none. After an error there is no buffer; the rest is as for dml_alloc_and_read(). */
int32_t dml_alloc_and_read_ranges(const struct dml_range *ranges, size_t count, const struct dml_read_config *config,
				  size_t buffer_count, dml_buffer *buffers, struct dml_filled *filled);
/* Returns a new descriptor of the buffer's memory, sealed against changes of its size, which the caller closes;
 * -EOPNOTSUPP without DML_READ_SHAREABLE. */
int32_t dml_buffer_export(dml_buffer buffer, int *fd);
/* The same pages as a dma-buf, which drivers import (by /dev/udmabuf). -ENOENT where the kernel has no udmabuf,
 * -EOPNOTSUPP without DML_READ_SHAREABLE, -EINVAL for a buffer larger than size_limit_mb of the module udmabuf. */
int32_t dml_buffer_export_dma_buf(dml_buffer buffer, int *fd);
int32_t dml_buffer_destroy(dml_buffer buffer);

/* Files of tensors in host memory: their headers are parsed once, when they are opened. */
typedef uint64_t dml_model;
/* A tensor in host memory, or a slice of one. */
typedef uint64_t dml_host_tensor;
/* The tensors of a model, read ahead in the order of their bytes. */
typedef uint64_t dml_stream;

/* How a model is opened. Zero it, set `size`, then the fields that are needed. */
struct dml_model_config {
	uint64_t size; /* sizeof(struct dml_model_config) */
	uint64_t memory_limit; /* most bytes that its tensors take at a time; 0 for no limit */
	uint32_t flags; /* DML_READ_DIRECT, DML_READ_BUFFERED or 0 */
	uint32_t zero;
};

#define DML_DIMS 8

struct dml_model_tensor {
	uint64_t len; /* bytes */
	uint64_t name_len; /* bytes of its name, without the terminating zero */
	uint64_t dims; /* dimensions, at most DML_DIMS */
	uint64_t shape[DML_DIMS];
	char dtype[16]; /* type of an element, as the file spells it ("F32"); empty for bytes without a type */
};

/* A range of a dimension, in elements. */
struct dml_slice {
	uint64_t start;
	uint64_t stop; /* behind the last one */
};

/* Opens files of tensors: `paths` are files, directories, indices, or "kept:NAME" for a model that a keeper lends, of
 * which nothing is read or copied. -EINVAL for files that are no models, and where two have a tensor of one name. */
int32_t dml_model_open(const char *const *paths, size_t count, const struct dml_model_config *config, dml_model *model);
/* Tensor `index`, from 0 in the order of the files and of their bytes, and its name, cut to `size` bytes including the
 * terminating zero; `name` may be null. -ENOENT behind the last, -EOVERFLOW for more than DML_DIMS dimensions. */
int32_t dml_model_tensor(dml_model model, uint64_t index, struct dml_model_tensor *tensor, char *name, size_t size);
/* Reads a tensor. `filled` says where its bytes are until the tensor is destroyed; it has no checksum. -ENOMEM where
 * the memory limit does not allow it now. */
int32_t dml_model_read(dml_model model, const char *name, dml_host_tensor *tensor, struct dml_filled *filled);
/* Reads a slice: `count` ranges, one for each dimension. -EINVAL for ranges beyond the tensor, and for types without a
 * size. */
int32_t dml_model_slice(dml_model model, const char *name, const struct dml_slice *slices, size_t count,
			dml_host_tensor *tensor, struct dml_filled *filled);
/* Begins to read all tensors on a thread, ahead within the memory limit. */
int32_t dml_model_stream(dml_model model, dml_stream *stream);
/* Waits for the next tensor of a stream, and its name as for dml_model_tensor(). -ENOENT behind the last; -ENOMEM when
 * the limit is in use by tensors that are not destroyed within half a second. -ENOENT, too, soon after another thread
 * has destroyed the stream. */
int32_t dml_stream_next(dml_stream stream, dml_host_tensor *tensor, struct dml_filled *filled, char *name, size_t size);
int32_t dml_stream_destroy(dml_stream stream);
/* Gives the bytes back to the memory limit when no other tensor of the same read is left. */
int32_t dml_host_tensor_destroy(dml_host_tensor tensor);
/* Tensors and streams of the model stay until they are destroyed. */
int32_t dml_model_destroy(dml_model model);

/* An open device: a card, a GPU, a file. Calls on one target take turns. */
typedef uint64_t dml_target;
/* Host memory that a target reaches. */
typedef uint64_t dml_memory;
/* A file on a target. */
typedef uint64_t dml_load;

#define DML_TARGET_FLAT (1u << 0) /* no MMU: what is bound must be contiguous, and lies where it is seen */
/* Operations of the device besides copies: */
#define DML_TARGET_WITHIN (1u << 1)  /* DML_WITHIN */
#define DML_TARGET_FILL (1u << 2)    /* DML_FILL */
#define DML_TARGET_COMPARE (1u << 3) /* DML_COMPARE */
#define DML_TARGET_ROWS (1u << 4)    /* rows */
#define DML_TARGET_GATHER (1u << 5)  /* DML_MORE */
#define DML_TARGET_CANCEL (1u << 6)  /* dml_target_cancel() of what the device has begun */

struct dml_target_info {
	uint64_t free; /* bytes of device memory */
	uint64_t page; /* smallest page of its address space */
	uint64_t max_len; /* bytes of one operation, at most */
	uint64_t capacity; /* operations in flight, at most */
	uint64_t max_parts; /* operations of one gather list, at most; UINT64_MAX: no limit */
	uint32_t flags; /* DML_TARGET_FLAT and so on */
	uint32_t zero;
};

/* Opens a device by the name that `dmalane devices` prints: "soft", "vulkan:0", "cuda:0", "vfio:0000:01:00.0",
 * "ram:64MiB". Options follow behind commas: "soft,ddr=1GiB,hbm=4MiB" takes little address space, for programs under
 * `ulimit -v` or Valgrind ("soft" takes 96 GiB of it). -EINVAL for a name that names nothing, the kernel's error for a
 * device that cannot be opened, or -ENODEV. A target belongs to the process that opened it: in a child of fork() its
 * calls return -ENODEV, and destroying objects undoes nothing. */
int32_t dml_target_open(const char *name, dml_target *target);
int32_t dml_target_info(dml_target target, struct dml_target_info *info);
/* -EBUSY while completions have not been polled. Its host memory and its loads exist until they are destroyed. */
int32_t dml_target_close(dml_target target);

/* Allocates `len` bytes of host memory, whole pages of zeroes, and registers it. `data` is where the bytes are. The
 * bytes that an operation in flight writes or reads belong to the device until its completion was polled. */
int32_t dml_memory_create(dml_target target, uint64_t len, dml_memory *memory, void **data);
/* Registers a buffer that dml_alloc_and_read() filled, without copying it. The buffer becomes the host memory: its
 * handle is gone. -EBUSY while another call uses it. -EOPNOTSUPP or -EIO where a device reaches only memory of its own
 * heap (dml_memory_create); the buffer then stays. */
int32_t dml_memory_register(dml_target target, dml_buffer buffer, dml_memory *memory, void **data);
/* -EBUSY while an operation in flight uses it. */
int32_t dml_memory_destroy(dml_memory memory);

/* Allocates device memory: `placement` is the name of a region or group ("hbm"), or null for the first region. The
 * handle is one for dml_target_bind(). */
int32_t dml_target_allocate(dml_target target, uint64_t len, const char *placement, uint32_t *handle);
/* -EBUSY while it is bound, a range is reserved for it, or completions have not been polled. */
int32_t dml_target_free(dml_target target, uint32_t handle);

/* Reserves `len` bytes of device virtual addresses for device memory, 0 for as many as that has. `reserved` is the
 * length of the range, which may be longer: what dml_target_bind() binds there is at most the memory's length, rounded
 * up to its page (`page` of dml_target_info). With DML_TARGET_FLAT the range is where the memory lies. */
int32_t dml_target_reserve(dml_target target, uint32_t handle, uint64_t len, uint64_t *va, uint64_t *reserved);
/* Unbinds all in the range that begins at `va`, and gives it back. -EBUSY while completions have not been polled. */
int32_t dml_target_release(dml_target target, uint64_t va);
/* Applies `count` operations, as dml_vm_bind() does, within reserved ranges, all or none. After -EIO nothing is bound
 * there. */
int32_t dml_target_bind(dml_target target, const void *operations, size_t stride, size_t count);

/* Kinds of operations: */
#define DML_TO_DEVICE 0u /* copy from host memory to `at` */
#define DML_TO_HOST 1u   /* copy from `at` to host memory */
#define DML_WITHIN 2u    /* copy from `value`, an address of the device, to `at`; -EINVAL where they overlap */
#define DML_FILL 3u      /* repeat the eight bytes of `value`, the lowest first, from `at` on */
#define DML_COMPARE 4u   /* compare host memory with `at`; ends with -EBADMSG where they differ */
#define DML_FENCE 5u     /* what follows begins when everything before has ended */
/* and for the two copies of host memory: the next operation goes on with the same gather list, which is one operation
 * that ends once, as the last of the list. */
#define DML_MORE (1u << 31)

/* An operation. Fields that its kind does not use are 0. */
struct dml_target_op {
	uint32_t kind;
	uint32_t rows; /* rows at these pitches, or 0: no rows, and no pitches */
	uint64_t user; /* comes back with the completion; of a gather list, that of its last operation */
	uint64_t len; /* bytes; with rows, those of one row */
	uint64_t at; /* device virtual address */
	dml_memory memory; /* host memory, and the offset in it in bytes: the two copies, DML_COMPARE */
	uint64_t offset;
	uint64_t value; /* DML_WITHIN, DML_FILL */
	uint64_t memory_pitch; /* from one row to the next, in bytes: in host memory, or at `value` of DML_WITHIN */
	uint64_t pitch; /* at `at`. A pattern begins anew in each row */
};

struct dml_completion {
	uint64_t user;
	uint64_t bytes; /* known to be done, from the first on */
	int32_t result; /* 0 or a negative error number */
	uint32_t zero;
};

/* Submits `count` operations, `stride` bytes apart, and starts them. `stride` is at least 48, for operations that end
 * with `offset`; bytes beyond the structure must be 0. They run and end in any order: one that needs the effect of
 * another is submitted behind a DML_FENCE, or once that was polled. Stops at the first that is refused and returns its
 * error; `accepted` is the number of those before it, without a part of a gather list.
 * -EAGAIN: poll, then submit the rest. -E2BIG: more than `max_len` or `max_parts`. -EBUSY: an operation in
 * flight, or another part of the list, writes host memory that this one uses, or reads what it writes; any number may
 * read the same bytes. -EOPNOTSUPP: the device cannot do that. */
int32_t dml_target_submit(dml_target target, const void *operations, size_t stride, size_t count, size_t *accepted);
/* Cancels the oldest operation in flight with this `user`. It is polled as ever, with -ECANCELED unless it was done.
 * -ENOENT if there is none or it has ended; -EALREADY if the device has begun with it and does it all. */
int32_t dml_target_cancel(dml_target target, uint64_t user);
/* Waits for up to `timeout_ms` milliseconds (0: only looks; UINT64_MAX: no limit) until an operation has ended or none
 * is in flight, and writes up to `capacity` completions. A completion may say that its operation failed;
 * dml_last_error() then has the details of the last that did. -ENODEV: the device is lost, or did not stop within two
 * seconds. Everything in flight then ends so, and all objects can be destroyed; memory that the device may still reach
 * is never used again. */
int32_t dml_target_poll(dml_target target, struct dml_completion *done, size_t capacity, uint64_t timeout_ms,
	size_t *count);
/* Stops all operations: those in flight end soon, with -ECANCELED unless they were done, and are polled as ever;
 * further ones are refused. -EOPNOTSUPP where the device cannot. */
int32_t dml_target_stop(dml_target target);
/* Lets the device work again. -EBUSY while completions have not been polled; -EINVAL if it has not stopped; -ENODEV if
 * it does not answer. */
int32_t dml_target_restart(dml_target target);

#define DML_LOAD_VERIFY (1u << 0) /* reads everything back and compares it with the file; -EBADMSG if it differs */
/* Tensors start at multiples of 1 << log2 bytes, at most 2 MiB; from 4 KiB on each has pages of its own. */
#define DML_LOAD_ALIGN(log2) ((uint32_t)(log2) << 8)

struct dml_tensor {
	uint64_t va; /* device virtual address; 0 when it has no bytes */
	uint64_t len;
	uint64_t name_len; /* bytes of its name, without the terminating zero */
};

/* Loads a file, as one tensor if it is of no known format, and binds each tensor for reading. `placement` as above.
 * -EBUSY while completions have not been polled. After an error nothing stays on the device. */
int32_t dml_target_load(dml_target target, const char *path, const char *placement, uint32_t flags, dml_load *load);
/* The same for a model that is open. */
int32_t dml_target_load_model(dml_target target, dml_model model, const char *placement, uint32_t flags,
			      dml_load *load);
/* Attaches to a model that a keeper has in memory of the target (`dmalane keep -d`), by its name or the beginning of
 * its hash: nothing is copied. The tensors are for reading alone. `flags` is DML_LOAD_VERIFY or 0. -ENOENT without such
 * a model, -EINVAL where it is in other memory, -EOPNOTSUPP where the target's memory cannot be lent. */
int32_t dml_target_attach(dml_target target, const char *name, uint32_t flags, dml_load *load);
/* Tensor `index`, from 0 in the order of the file, and its name, cut to `size` bytes including the terminating zero;
 * `name` may be null. -ENOENT behind the last. */
int32_t dml_load_tensor(dml_load load, uint64_t index, struct dml_tensor *tensor, char *name, size_t size);
int32_t dml_load_find(dml_load load, const char *name, struct dml_tensor *tensor);
/* Type and shape of tensor `index`, as of dml_model_tensor(). */
int32_t dml_load_type(dml_load load, uint64_t index, struct dml_model_tensor *tensor, char *name, size_t size);
/* Unbinds and frees all of it. -EBUSY while completions have not been polled. The load is gone, too, after -EIO: the
 * device is lost, and cannot be told. */
int32_t dml_load_destroy(dml_load load);

#ifdef __cplusplus
}
#endif

#endif
