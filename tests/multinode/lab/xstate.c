/* Preloaded into linux.uml on hosts whose CPU state is larger than UML 6.1 knows (AMX tiles): there
 * the kernel refuses its PTRACE_SETREGSET, which has to be of the whole size, with EFAULT. What UML
 * does not know of is left as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

static long (*real)(int, ...);
static char whole[1 << 16]; /* UML's stacks are small, and only one of its threads traces */

__attribute__((constructor)) static void find_real(void)
{
	real = (long (*)(int, ...))dlsym(RTLD_NEXT, "ptrace");
}

long ptrace(enum __ptrace_request request, ...)
{
	va_list more;
	va_start(more, request);
	pid_t pid = va_arg(more, pid_t);
	void *addr = va_arg(more, void *), *data = va_arg(more, void *);
	va_end(more);
	struct iovec *known = data, all = { whole, sizeof whole };
	/* Not judged by errno after a first try: UML's signal handlers change it. */
	if (request != PTRACE_SETREGSET || addr != (void *)NT_X86_XSTATE ||
	    real(PTRACE_GETREGSET, pid, addr, &all) < 0 || all.iov_len <= known->iov_len)
		return real(request, pid, addr, data);
	memcpy(whole, known->iov_base, known->iov_len);
	return real(PTRACE_SETREGSET, pid, addr, &all);
}
