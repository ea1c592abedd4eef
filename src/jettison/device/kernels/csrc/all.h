/* Every algorithm for the dtype whose macros kernels.c has defined; undefines them for the next one. */
#include "elementwise.h"
#include "gemm.h"
#if IS_PACKED
#include "packed.h"
#endif
#include "attention.h"
#include "layer.h"

#undef NAME
#undef T
#undef ACC
#undef VACC
#undef CHUNK
#undef STORAGE_IS_NARROW
#undef LOAD_T
#undef LOAD_A
#undef STORE_T
#undef STORE_A
#undef SUM4
#undef TO_ACC
#undef FROM_ACC
#undef SQRT
#undef EXP
#undef TANH
#undef LOG
#undef BF16_DOT
#undef IS_PACKED
