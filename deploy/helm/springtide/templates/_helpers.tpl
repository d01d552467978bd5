{{- /* What the templates share. Kept equal to `springtide k8s render` by tests/backends/kubernetes/install/test_helm_chart.py. */ -}}

{{- /* The settings as the control plane reads them, as JSON: filled in as settings_file.complete does it. */ -}}
{{- define "springtide.settings" -}}
{{- $settings := dict -}}
{{- range $name, $value := omit .Values "install" "global" -}}
{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $settings $name $value -}}{{- end -}}
{{- end -}}
{{- $_ := set $settings "namespace" .Release.Namespace -}}
{{- $_ := set $settings "advertise" (.Values.advertise | default (printf "%s.%s.svc" .Values.name .Release.Namespace)) -}}
{{- if and .Values.install.share_daemon (not .Values.share_directory) -}}
{{- $_ := set $settings "share_directory" "/run/springtide" -}}
{{- end -}}
{{- $_ := set $settings "pod" (set (deepCopy .Values.pod) "image" (include "springtide.workerImage" .)) -}}
{{- $_ := set $settings "controller" (set (deepCopy .Values.controller) "image" (include "springtide.controlPlaneImage" .)) -}}
{{- toJson $settings -}}
{{- end -}}

{{- define "springtide.registry" -}}
{{- if .Values.install.registry -}}{{ trimSuffix "/" .Values.install.registry }}/{{- end -}}
{{- end -}}

{{- define "springtide.workerImage" -}}
{{- .Values.pod.image | default (printf "%sspringtide-worker:%s" (include "springtide.registry" .) .Chart.AppVersion) -}}
{{- end -}}

{{- define "springtide.controlPlaneImage" -}}
{{- .Values.controller.image | default (printf "%sspringtide-control-plane:%s" (include "springtide.registry" .) .Chart.AppVersion) -}}
{{- end -}}

{{- define "springtide.selector" -}}
app.kubernetes.io/name: springtide
app.kubernetes.io/instance: {{ .root.Values.name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- /* Metadata of an object: root, name, and optionally namespace, component, labels. */ -}}
{{- define "springtide.metadata" -}}
name: {{ .name | quote }}
{{- if .namespace }}
namespace: {{ .namespace }}
{{- end }}
labels:
  {{- include "springtide.selector" (dict "root" .root "component" (.component | default "control-plane")) | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  {{- range .labels }}
  {{ . }}: "true"
  {{- end }}
{{- end -}}

{{- /* A binding of the role of the same name to an account of the platform. */ -}}
{{- define "springtide.binding" -}}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: {{ .kind }}, name: {{ .name | quote }}}
subjects:
- {kind: ServiceAccount, name: {{ .account }}, namespace: {{ .namespace }}}
{{- end -}}

{{- /* An operator's overlay: {"value": base with over laid on top}, lists by what their members are called, as
       backends/kubernetes/client/overlay.py does it. Takes base, over, field. */ -}}
{{- define "springtide.merge" -}}
{{- $result := .over -}}
{{- if and (kindIs "map" .base) (kindIs "map" .over) -}}
  {{- $result = deepCopy .base -}}
  {{- range $name, $value := .over -}}
    {{- if kindIs "invalid" $value -}}
      {{- $result = omit $result $name -}}
    {{- else if hasKey $result $name -}}
      {{- $both := include "springtide.merge" (dict "base" (get $result $name) "over" $value "field" $name) | fromJson -}}
      {{- $_ := set $result $name (get $both "value") -}}
    {{- else -}}
      {{- $_ := set $result $name $value -}}
    {{- end -}}
  {{- end -}}
{{- else if and (kindIs "slice" .base) (kindIs "slice" .over) -}}
  {{- $keys := dict "volumeMounts" "mountPath" "ports" "containerPort" "tolerations" "key" "hostAliases" "ip" -}}
  {{- $key := get $keys .field | default "name" -}}
  {{- $isNamed := true -}}
  {{- range concat .base .over -}}
    {{- if not (kindIs "map" .) -}}{{- $isNamed = false -}}
    {{- else if not (hasKey . $key) -}}{{- $isNamed = false -}}
    {{- end -}}
  {{- end -}}
  {{- if $isNamed -}}
    {{- $over := dict -}}
    {{- range .over -}}{{- $_ := set $over (toJson (get . $key)) . -}}{{- end -}}
    {{- $result = list -}}
    {{- $known := dict -}}
    {{- range .base -}}
      {{- $member := . -}}
      {{- $name := toJson (get . $key) -}}
      {{- $_ := set $known $name true -}}
      {{- if hasKey $over $name -}}
        {{- $both := include "springtide.merge" (dict "base" . "over" (get $over $name) "field" "") | fromJson -}}
        {{- $member = get $both "value" -}}
      {{- end -}}
      {{- $result = append $result $member -}}
    {{- end -}}
    {{- range .over -}}
      {{- if not (hasKey $known (toJson (get . $key))) -}}{{- $result = append $result . -}}{{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- toJson (dict "value" $result) -}}
{{- end -}}
