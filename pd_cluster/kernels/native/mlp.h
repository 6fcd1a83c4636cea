/* The gated feed-forward layer. */
#pragma once

#include "step.h"

typedef struct {
    Norm norm; /* weight null: the input is normalised already */
    Linear gate_up, down;
} MlpLayer;
